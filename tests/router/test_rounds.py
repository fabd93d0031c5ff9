"""The lane's decisions, driven by a clock of the test's own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cluster import digest
from cluster.config import SchedulingConfig
from cluster.errors import BadSamplingParameter, FrameError
from cluster.wire import FINISH_STOP, Failure
from router.lane_request import Emission, Failed, Phase, Retry
from tests.frames import make_result, make_sampling
from tests.router.lane_rig import A, B, Rig


def test_life_of_a_request() -> None:
    rig = Rig()
    assert rig.state.next_step_at(rig.now) == math.inf
    rig.add(1)
    assert rig.state.next_step_at(rig.now) <= rig.now
    step = rig.step()
    assert [(a.rid, a.drafter_id, a.want_draft) for a in step.admissions] == [(1, "a", True)]
    assert rig.phases() == {1: Phase.PREFILLING}
    assert rig.state.next_step_at(rig.now) == math.inf, "nothing else to do"
    (first,) = rig.state.apply(rig.result(step, prefilled=(1,)), rig.now)
    assert first == Emission(rid=1, token_ids=(1,), logprobs=(0.0,), finish=0, is_round=False)
    assert rig.phases() == {1: Phase.AWAITING}
    assert rig.state.next_step_at(rig.now) == rig.now + 1.0, "until the bound, nothing learnt yet"
    rig.state.take_block("a", rig.block(1), rig.now + 0.1)
    assert rig.phases() == {1: Phase.READY}
    assert rig.state.next_step_at(rig.now) <= rig.now
    step = rig.step(lengths=3)
    assert step.draft_ids.tolist() == [5, 5, 5]
    assert step.want_draft.tolist() == [1]
    result = rig.result(step, finish=np.array([FINISH_STOP], np.uint8))
    (last,) = rig.state.apply(result, rig.now)
    assert last.finish == FINISH_STOP
    assert (last.num_proposed, last.num_verified, last.num_accepted) == (4, 3, 3)
    assert rig.state.requests == {}
    assert rig.state.next_step_at(rig.now) == math.inf, "the verifier freed it: nothing to release"
    assert rig.book.num_bound() == {"a": 0}


def test_late_draft_goes_without_and_the_wait_is_learnt() -> None:
    rig = Rig()
    rig.add(1)
    rig.prefill(1)
    rig.state.take_block("a", rig.block(1), rig.now + 0.1)
    rig.state.apply(rig.result(rig.step()), rig.now)
    at = rig.state.next_step_at(rig.now)
    assert rig.now + 0.1 < at < rig.now + 0.5, "some multiple of the 0.1 s seen"
    rig.now = at
    step = rig.step()
    assert step.num_draft.tolist() == [0]
    assert rig.counters.num_late_drafts == 1
    rig.state.take_block("a", rig.block(1), rig.now)
    assert rig.counters.stale["late"] == 1


def test_a_late_block_is_used_if_its_row_has_not_gone_yet() -> None:
    rig = Rig()
    rig.add(1)
    rig.prefill(1)
    rig.now += 1.0
    rig.state.ready_rows(rig.now)
    rig.state.take_block("a", rig.block(1), rig.now)
    assert rig.state.requests[1].block is not None


def test_the_second_of_two_blocks_for_one_anchor_is_never_looked_at() -> None:
    rig = Rig()
    rig.add(1)
    rig.prefill(1)
    rig.state.take_block("a", rig.block(1), rig.now)
    rig.state.take_block("a", rig.block(1, ids=(6,) * 4), rig.now)
    assert rig.state.requests[1].block is not None
    assert rig.state.requests[1].block.ids == (5,) * 4
    assert rig.counters.stale["unasked"] == 1


def test_a_block_that_outruns_the_result_is_kept_for_it() -> None:
    """The verifier tells the drafter first: a quick one answers before the anchor is known."""
    rig = Rig()
    request = rig.add(1)
    step = rig.step()
    first = digest.extend(request.digest, [1])
    rig.state.take_block("a", rig.block(1, anchor=3, digest=first), rig.now)
    rig.state.apply(rig.result(step, prefilled=(1,)), rig.now)
    assert (rig.phases(), request.block is not None) == ({1: Phase.READY}, True)
    step = rig.step(lengths=2)
    after = digest.extend(first, [5, 5, 1])
    rig.state.take_block("a", rig.block(1, anchor=6, digest=after), rig.now)
    assert request.block is not None
    assert request.block.anchor == 3, "the block in the step stays what it is"
    rig.state.apply(rig.result(step), rig.now)
    assert request.block is not None
    assert (request.anchor, request.block.anchor, request.phase) == (6, 6, Phase.READY)
    assert rig.counters.stale.total() == rig.counters.num_late_drafts == 0


@pytest.mark.parametrize(
    ("reason", "changes"), [("anchor", {"anchor": 5}), ("digest", {"digest": 7})]
)
def test_an_early_block_is_judged_like_any_other(reason: str, changes: dict[str, Any]) -> None:
    rig = Rig()
    request = rig.add(1)
    step = rig.step()
    rig.state.take_block("a", rig.block(1, **({"anchor": 3} | changes)), rig.now)
    rig.state.apply(rig.result(step, prefilled=(1,)), rig.now)
    assert rig.counters.stale == {reason: 1}
    assert request.block is None
    assert request.early is None


def test_an_early_block_dies_with_its_session() -> None:
    rig = Rig()
    request = rig.add(1)
    step = rig.step()
    rig.state.take_block("a", rig.block(1, anchor=3), rig.now)
    rig.state.lose_session("a", 1, 0, rig.now)
    rig.state.apply(rig.result(step, prefilled=(1,)), rig.now)
    assert (request.block, request.early, request.phase) == (None, None, Phase.READY)


def test_blocks_count_only_from_the_requests_own_drafter() -> None:
    rig = Rig()
    rig.add(1)
    rig.prefill(1)
    rig.state.take_block("b", rig.block(1), rig.now)
    assert rig.counters.stale["drafter"] == 1
    assert rig.phases() == {1: Phase.AWAITING}


def test_prefill_goes_on_while_drafts_are_awaited() -> None:
    rig = Rig()
    rig.add(1)
    rig.prefill(1)
    rig.add(2)
    assert rig.state.next_step_at(rig.now) <= rig.now
    step = rig.step()
    assert step.rid.tolist() == []
    assert [a.rid for a in step.admissions] == [2]


def test_each_drafter_is_expected_to_take_as_long_as_its_own_blocks_do() -> None:
    rig = Rig(drafters=(A, B))
    for n in (1, 2, 3) * 20:
        for link in rig.book.links().values():
            link.observe(n, 0.006 * n, 0.006 * n)
    for rid in (1, 2):
        rig.add(rid)
    rig.prefill(1, 2)
    for rid in (1, 2):
        rig.answer(rid)
    rig.state.apply(rig.result(rig.step()), rig.now)
    assert set(rig.phases().values()) == {Phase.AWAITING}
    rig.add(3)
    # A step of 10 ms would be in the way of two drafters with one block each, of 6 ms; it would not
    # if one of them had both.
    assert rig.state.next_step_at(rig.now) > rig.now


def test_ready_rows_wait_for_outstanding_drafts() -> None:
    rig = Rig()
    rig.learn_latency(1, 0.002)
    for rid in (2, 3):
        rig.add(rid)
    rig.prefill(2, 3)
    asked = rig.now
    rig.now += 0.001
    rig.state.take_block("a", rig.block(2), rig.now)
    assert asked + 0.002 < rig.state.next_step_at(rig.now) < asked + 0.1
    rig.state.take_block("a", rig.block(3), rig.now)
    assert rig.state.next_step_at(rig.now) <= rig.now


@pytest.mark.parametrize(("gather", "waits"), [("when_free", False), ("wait_for_all", True)])
def test_the_simple_rules_can_be_asked_for(gather: str, waits: bool) -> None:
    rig = Rig()
    rig.state.configure(SchedulingConfig(gather=gather))
    for rid in (1, 2):
        rig.add(rid)
    rig.prefill(1, 2)
    rig.state.take_block("a", rig.block(1), rig.now)
    assert rig.state.next_step_at(rig.now) == rig.now + 1.0 * waits
    rig.state.take_block("a", rig.block(2), rig.now)
    assert rig.state.next_step_at(rig.now) <= rig.now


def test_plain_requests_wait_for_nobody() -> None:
    rig = Rig()
    rig.add(1, draft=False)
    rig.prefill(1)
    assert rig.phases() == {1: Phase.READY}
    assert rig.step().want_draft.tolist() == [0]


def test_no_block_is_asked_for_when_it_cannot_be_of_use() -> None:
    rig = Rig()
    rig.add(1, max_new_tokens=2)
    step = rig.step()
    assert step.admissions[0].drafter_id == ""
    rig.state.apply(rig.result(step, prefilled=(1,)), rig.now)
    assert rig.phases() == {1: Phase.READY}


def test_releases_go_with_the_next_step_or_alone() -> None:
    rig = Rig()
    rig.add(1)
    rig.state.end(1)
    assert rig.state.next_step_at(rig.now) == math.inf, "the verifier never heard of it"
    rig.add(2)
    rig.prefill(2)
    rig.state.end(2)
    assert rig.state.next_step_at(rig.now) <= rig.now
    assert rig.step().releases.tolist() == [2]


def test_a_request_ended_while_in_step_is_released_after_it() -> None:
    rig = Rig()
    rig.add(1, draft=False)
    rig.prefill(1)
    step = rig.step()
    result = rig.result(step)
    rig.state.end(1)
    assert rig.state.apply(result, rig.now) == []
    assert rig.step().releases.tolist() == [1]


def test_dead_drafter_frees_the_request_and_a_rebind_goes_with_its_row() -> None:
    rig = Rig(drafters=(A, B))
    rig.add(1)
    rig.prefill(1)
    rig.book.down("a")
    rig.state.lose_drafter("a", rig.now)
    assert rig.phases() == {1: Phase.READY}
    step = rig.step()
    (rebind,) = step.rebinds
    assert (rebind.rid, rebind.drafter_id, rebind.session_epoch) == (1, "b", 1)
    assert not rebind.want_draft, "its row asks"
    assert step.want_draft.tolist() == [1]
    rig.state.apply(rig.result(step), rig.now)
    rig.state.take_block("b", rig.block(1, epoch=0), rig.now)
    assert rig.counters.stale["epoch"] == 1
    rig.state.take_block("b", rig.block(1), rig.now)
    assert rig.state.requests[1].block is not None


def test_lost_sessions_are_rebound_after_a_growing_pause() -> None:
    rig = Rig()
    rig.add(1, max_new_tokens=200)
    rig.prefill(1)
    pauses = []
    for _ in range(3):
        rig.state.lose_session("a", 1, rig.state.requests[1].session_epoch, rig.now)
        lost = rig.now
        while not (step := rig.step()).rebinds:
            rig.state.apply(rig.result(step), rig.now)
            rig.now += 0.01
        pauses.append(rig.now - lost)
        rig.state.apply(rig.result(step), rig.now)
    assert pauses == sorted(pauses)
    assert pauses[2] > 3 * pauses[0] > 0


def test_unbound_by_the_verifier_goes_plain_at_once() -> None:
    rig = Rig()
    rig.add(1)
    step = rig.step()
    rig.state.apply(rig.result(step, prefilled=(1,), unbound=np.array([1, 77], np.int64)), rig.now)
    assert rig.phases() == {1: Phase.READY}
    assert rig.step().want_draft.tolist() == [0]


def test_outcomes_are_learnt_of_the_block_that_was_in_the_step() -> None:
    """The next block may be in hand already when the result of the last one comes."""
    rig = Rig()
    request = rig.add(1, sampling=make_sampling(temperature=1.0, mode="coupled"))
    rig.prefill(1)
    rig.state.take_block("a", rig.block(1, confidence=np.array([0.5, 0.6, 0.7, 0.8])), rig.now)
    step = rig.step(lengths=3)
    after = digest.extend(request.digest, [5, 7])
    early = rig.block(1, anchor=request.anchor + 2, digest=after, confidence=np.full(4, 0.1))
    rig.state.take_block("a", early, rig.now)
    refused_second = {
        "num_accepted": np.array([1], np.int32),
        "num_emitted": np.array([2], np.int32),
        "token_ids": np.array([5, 7], np.int32),
        "logprobs": np.zeros(2, np.float32),
        "anchor": np.array([request.anchor + 2], np.int32),
        "digest": np.array([after], np.uint64),
    }
    rig.state.apply(rig.result(step, **refused_second), rig.now)
    figures = rig.recalibrator.figures()
    assert {k: v for k, v in figures.items() if k.endswith(("reported", "accepted"))} == {
        "coupled.1.reported": pytest.approx(0.5),
        "coupled.1.accepted": 1.0,
        "coupled.2.reported": pytest.approx(0.6),
        "coupled.2.accepted": 0.0,
    }


def test_a_row_that_does_not_follow_teaches_nothing() -> None:
    rig = Rig()
    rig.add(1)
    rig.prefill(1)
    rig.state.take_block("a", rig.block(1), rig.now)
    rig.state.apply(rig.result(rig.step(lengths=2), digest=np.array([1], np.uint64)), rig.now)
    assert rig.recalibrator.figures() == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": np.array([1], np.uint64)},
        {"anchor": np.array([99], np.int32)},
        {"num_accepted": np.array([1], np.int32)},
        {
            "num_emitted": np.array([2], np.int32),
            "token_ids": np.array([1, 1], np.int32),
            "logprobs": np.zeros(2, np.float32),
        },
    ],
)
def test_a_row_that_does_not_follow_is_not_used_and_the_request_retried(
    changes: dict[str, Any],
) -> None:
    rig = Rig()
    rig.add(1, draft=False)
    rig.prefill(1)
    step = rig.step()
    (outcome,) = rig.state.apply(rig.result(step, **changes), rig.now)
    assert isinstance(outcome, Retry)
    assert rig.step().releases.tolist() == [1]


def test_a_row_that_the_result_passes_over_is_retried() -> None:
    rig = Rig()
    rig.add(1, draft=False)
    rig.prefill(1)
    step = rig.step()
    nothing = make_result(lane_epoch=9, step_id=step.step_id)
    assert [type(o) for o in rig.state.apply(nothing, rig.now)] == [Retry]


def test_failures_end_a_request_or_retry_it_by_their_code() -> None:
    rig = Rig()
    for rid in (1, 2):
        rig.add(rid)
    step = rig.step()
    failures = (
        Failure(rid=1, code="BadSamplingParameter", message="no"),
        Failure(rid=2, code="StaleFrame", message="gone"),
        Failure(rid=3, code="StaleFrame", message="never was"),
    )
    failed, retry = rig.state.apply(rig.result(step, failures=failures), rig.now)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, BadSamplingParameter)
    assert isinstance(retry, Retry)
    assert rig.state.requests == {}


@pytest.mark.parametrize(
    "changes", [{"step_id": 7}, {"lane_epoch": 8}, {"token_ids": np.array([50], np.int32)}]
)
def test_a_result_that_cannot_be_ends_the_lane(changes: dict[str, Any]) -> None:
    rig = Rig()
    rig.add(1, draft=False)
    rig.prefill(1)
    with pytest.raises(FrameError):
        rig.state.apply(rig.result(rig.step(), **changes), rig.now)


def test_a_verifier_that_cannot_go_on_with_prefill_is_not_spun_on() -> None:
    rig = Rig()
    rig.add(1)
    step = rig.step()
    rig.state.apply(rig.result(step, num_real_tokens=0, pending_prefill_tokens=3), rig.now)
    at = rig.state.next_step_at(rig.now)
    assert rig.now < at < rig.now + 1


def test_a_verifier_that_claims_prompts_that_nobody_has_is_not_spun_on() -> None:
    rig = Rig()
    rig.add(1)
    step = rig.step()
    rig.state.apply(rig.result(step, prefilled=(1,), pending_prefill_tokens=7), rig.now)
    assert rig.state.next_step_at(rig.now) == rig.now + 1.0, "when its block is given up"
    rig.answer(1)
    finished = rig.result(
        rig.step(), finish=np.array([FINISH_STOP], np.uint8), pending_prefill_tokens=7
    )
    rig.state.apply(finished, rig.now)
    assert rig.state.next_step_at(rig.now) == math.inf


def test_a_prompt_that_the_verifier_has_lost_count_of_is_not_forgotten() -> None:
    rig = Rig()
    rig.add(1)
    step = rig.step()
    rig.state.apply(rig.result(step, num_real_tokens=2, pending_prefill_tokens=0), rig.now)
    assert rig.state.next_step_at(rig.now) <= rig.now
    assert rig.step().prefill_budget > 0


def test_requests_and_kv_are_bounded() -> None:
    rig = Rig(max_requests=2, kv_blocks=8)
    assert rig.state.fits(64)
    assert not rig.state.fits(65)
    rig.add(1, num_prompt=3, max_new_tokens=29)  # 32 positions: 4 blocks
    assert rig.state.fits(32)
    assert not rig.state.fits(33)
    rig.add(2, num_prompt=3, max_new_tokens=1)
    assert not rig.state.fits(1), "no third request"


def test_a_step_never_exceeds_the_verifiers_tokens() -> None:
    rig = Rig(max_step_tokens=4, max_requests=8, kv_blocks=100)
    for rid in range(6):
        rig.add(rid, num_prompt=1, draft=False)
    step = rig.step()
    assert step.prefill_budget == 4
    rig.state.apply(rig.result(step, prefilled=(0, 1, 2, 3, 4), pending_prefill_tokens=1), rig.now)
    rows = rig.state.ready_rows(rig.now)
    assert len(rows) == 3, "one token is left for the prefill"
    assert rig.state.schedule(rows, now=rig.now) == [0] * 3
    step = rig.state.dispatch(rows, [0] * 3, rig.now)
    assert step.prefill_budget == 1
    rig.now += 1
    rig.state.apply(rig.result(step, prefilled=(5,)), rig.now)
    later = [request.rid for request in rig.state.ready_rows(rig.now)]
    assert later[:2] == [3, 4], "those that waited go first"


def test_plain_rows_stay_together() -> None:
    """A request that is done with its prompt joins the others when their step is back, or goes with
    what goes ahead of it. Alone, behind their running step, it would make two groups of plain rows:
    two steps of one."""
    rig = Rig()
    rig.add(1, draft=False, max_new_tokens=2)
    rig.prefill(1)
    rig.add(2, draft=False)
    last = rig.step()
    assert last.rid.tolist() == [1]
    rig.add(3, draft=False)
    rig.now += 100.0
    assert rig.state.next_step_at(rig.now) == math.inf, "the step in the air is long overdue"
    rig.state.apply(rig.result(last, prefilled=(2,)), rig.now)
    assert rig.step().rid.tolist() == [2]
    rig.add(4, draft=False)
    assert rig.state.next_step_at(rig.now + 100.0) == rig.now + 100.0
    assert rig.step().rid.tolist() == [2]
