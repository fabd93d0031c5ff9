"""One step runs, one is queued behind it: nothing is lost, doubled or mixed up between them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from cluster.config import SchedulingConfig
from cluster.errors import FrameError
from cluster.wire import FINISH_STOP, Failure, Step
from router.lane_request import Emission, Phase, Retry
from tests.router.lane_rig import A, B, Rig

STEP_S = 0.01
WHEN_FREE = SchedulingConfig(gather="when_free", policy="full")


def two_in_the_air(**options: object) -> tuple[Rig, Step, Step]:
    """Request 1 in the step that runs, request 2 in the one behind it; both have blocks."""
    rig = Rig(**options)  # type: ignore[arg-type]
    rig.state.configure(WHEN_FREE)
    for rid in (1, 2):
        rig.add(rid)
    rig.prefill(1, 2)
    rig.now += 0.001
    rig.answer(1)
    running = rig.step(lengths=2)
    rig.now += 0.001
    rig.answer(2)
    queued = rig.step(lengths=1)
    assert (running.rid.tolist(), queued.rid.tolist()) == ([1], [2])
    return rig, running, queued


def land(rig: Rig, step: Step, **changes: object) -> list[object]:
    rig.now += STEP_S
    return list(rig.state.apply(rig.result(step, **changes), rig.now))  # type: ignore[arg-type]


def test_a_step_is_handed_over_just_before_the_running_one_ends() -> None:
    rig = Rig()
    rig.state.configure(WHEN_FREE)
    for rid in (1, 2):
        rig.add(rid, max_new_tokens=200)
    rig.prefill(1, 2)
    link_s = 0.002
    for _ in range(20):
        for rid in (1, 2):
            rig.state.take_block("a", rig.block(rid), rig.now)
        step = rig.step()
        rig.now += STEP_S + link_s
        rig.state.apply(rig.result(step), rig.now)
    rig.state.take_block("a", rig.block(1), rig.now)
    sent = rig.now
    rig.step()
    rig.state.take_block("a", rig.block(2), rig.now)
    at = rig.state.next_step_at(rig.now)
    ends = sent + link_s + STEP_S
    assert ends - link_s - 0.5 * STEP_S <= at <= ends - link_s
    assert rig.state.next_step_at(at) <= at
    rig.now = at
    rig.step()
    rig.add(3)
    assert rig.state.next_step_at(rig.now) == math.inf, "one runs, one waits, and no more"


def test_late_dispatch_can_be_turned_off() -> None:
    rig = Rig()
    rig.state.configure(dataclasses.replace(WHEN_FREE, late_dispatch=False))
    for rid in (1, 2):
        rig.add(rid)
    rig.prefill(1, 2)
    rig.state.take_block("a", rig.block(1), rig.now)
    rig.step()
    rig.state.take_block("a", rig.block(2), rig.now)
    assert rig.state.next_step_at(rig.now) == math.inf


def test_results_come_in_order_and_settle_their_own_rows() -> None:
    rig, running, queued = two_in_the_air()
    first = land(rig, running)
    assert [(o.rid, o.num_accepted) for o in first if isinstance(o, Emission)] == [(1, 2)]
    assert rig.phases() == {1: Phase.AWAITING, 2: Phase.IN_STEP}
    second = land(rig, queued)
    assert [(o.rid, o.num_accepted) for o in second if isinstance(o, Emission)] == [(2, 1)]
    assert rig.phases() == {1: Phase.AWAITING, 2: Phase.AWAITING}
    assert rig.counters.num_queued_steps == 1


def test_a_session_opened_by_the_queued_step_outlives_news_of_the_one_before_it() -> None:
    rig = Rig(drafters=(A, B))
    rig.state.configure(WHEN_FREE)
    for rid in (1, 2):
        rig.add(rid)
    rig.prefill(1, 2)
    rig.answer(1)
    running = rig.step()
    assert rig.state.requests[2].drafter == B
    rig.book.down("b")
    rig.state.lose_drafter("b", rig.now)
    queued = rig.step()
    assert [(r.rid, r.drafter_id) for r in queued.rebinds] == [(2, "a")]
    # The verifier, too, has noticed that "b" is gone, while the first of the two steps ran.
    land(rig, running, unbound=np.array([2], np.int64))
    assert rig.state.requests[2].drafter == A
    assert rig.state.requests[2].failed_drafter == "b"
    land(rig, queued, unbound=np.array([2], np.int64))
    assert rig.state.requests[2].drafter is None, "this time it is the new one"


def test_a_result_out_of_order_ends_the_lane() -> None:
    rig, _, queued = two_in_the_air()
    with pytest.raises(FrameError):
        rig.state.apply(rig.result(queued), rig.now)


def test_a_result_that_comes_twice_ends_the_lane() -> None:
    rig, running, _ = two_in_the_air()
    result = rig.result(running)
    rig.state.apply(result, rig.now)
    with pytest.raises(FrameError):
        rig.state.apply(result, rig.now)


def test_a_request_ended_in_a_queued_step_is_released_behind_it() -> None:
    rig, running, queued = two_in_the_air()
    result = rig.result(queued)
    rig.state.end(2)
    land(rig, running)
    rig.now += STEP_S
    assert rig.state.apply(result, rig.now) == [], "its row came too late"
    rig.now += 1.1
    assert rig.step().releases.tolist() == [2]


def test_a_request_that_ends_in_the_running_step_is_in_no_other() -> None:
    rig, running, queued = two_in_the_air()
    land(rig, running, finish=np.array([FINISH_STOP], np.uint8))
    assert list(rig.phases()) == [2]
    land(rig, queued)
    rig.now += 1.1
    assert rig.step().releases.tolist() == [], "the verifier freed it by itself"


def test_a_crash_that_takes_the_queued_rows_along_has_each_retried_once() -> None:
    """The engine dropped everything in the running step; the queued one finds nothing there."""
    rig, running, queued = two_in_the_air()
    rows = rig.result(queued)
    failures = tuple(Failure(rid=rid, code="DSparkError", message="gone") for rid in (1, 2))
    nothing = {
        name: getattr(rows, name)[:0]
        for name in (
            "rid",
            "num_accepted",
            "num_emitted",
            "token_ids",
            "logprobs",
            "anchor",
            "digest",
            "finish",
        )
    }
    rig.now += STEP_S
    crashed = dataclasses.replace(rows, step_id=running.step_id, failures=failures, **nothing)
    outcomes = rig.state.apply(crashed, rig.now)
    assert [(type(o), o.rid) for o in outcomes] == [(Retry, 1), (Retry, 2)]
    stale = (Failure(rid=2, code="StaleFrame", message="not decoding here"),)
    rig.now += STEP_S
    assert rig.state.apply(dataclasses.replace(rows, failures=stale, **nothing), rig.now) == []
    assert rig.counters.num_retries == 2
    assert rig.step().releases.tolist() == [1, 2]


def test_a_session_lost_while_its_row_is_queued() -> None:
    rig, running, queued = two_in_the_air(drafters=(A, B))
    rig.state.lose_session("b", 2, 0, rig.now)
    land(rig, running)
    land(rig, queued)
    assert rig.phases()[2] is Phase.READY, "nobody drafts for it now"
    rig.now += 1.1
    (rebind,) = rig.step().rebinds
    assert (rebind.rid, rebind.drafter_id) == (2, "a")


def test_a_drafter_lost_with_two_steps_in_the_air() -> None:
    rig, running, queued = two_in_the_air()
    rig.book.down("a")
    rig.state.lose_drafter("a", rig.now)
    land(rig, running)
    land(rig, queued)
    assert rig.phases() == {1: Phase.READY, 2: Phase.READY}
    assert rig.step().rid.tolist() == [1, 2]


def test_a_block_for_a_queued_row_waits_for_its_result() -> None:
    rig, running, queued = two_in_the_air()
    request = rig.state.requests[2]
    land(rig, running)
    result = rig.result(queued)
    early = rig.block(2, anchor=int(result.anchor[0]), digest=int(result.digest[0]))
    rig.state.take_block("a", early, rig.now)
    assert request.phase is Phase.IN_STEP
    rig.state.apply(result, rig.now)
    assert (request.block, request.phase) == (early, Phase.READY)


def test_prompts_are_counted_once_with_two_steps_in_the_air() -> None:
    """What the queued step will compute is neither forgotten nor planned again."""
    rig = Rig(max_step_tokens=16)
    rig.state.configure(WHEN_FREE)
    rig.add(1, draft=False)
    rig.prefill(1)
    rig.add(2, num_prompt=20, max_new_tokens=4, draft=False)
    first = rig.step()
    assert first.prefill_budget == 8
    rig.now += 0.009
    second = rig.step()
    assert (second.prefill_budget, second.rid.tolist()) == (8, [])
    rig.now += 0.001
    rig.state.apply(rig.result(first, pending_prefill_tokens=12), rig.now)
    third = rig.step()
    assert third.prefill_budget == 4, "20 - 8 - 8"
    assert third.rid.tolist() == [1]


def test_a_queued_step_leaves_no_gap() -> None:
    rig, running, queued = two_in_the_air()
    land(rig, running)
    before = rig.state.profile.overhead_s
    rig.now += STEP_S
    rig.state.apply(rig.result(queued, step_s=STEP_S), rig.now)
    assert rig.state.profile.overhead_s == pytest.approx(0.95 * before), "a gap of 0 was recorded"


def test_a_step_that_was_not_queued_has_its_gap_recorded() -> None:
    rig = Rig()
    rig.add(1)
    rig.prefill(1)
    rig.now += 0.3  # drafting
    rig.state.take_block("a", rig.block(1), rig.now)
    step = rig.step()
    rig.now += STEP_S + 0.1  # on the way
    rig.state.apply(rig.result(step, step_s=STEP_S), rig.now)
    assert rig.state.profile.overhead_s == pytest.approx(0.05 * 0.4)


def test_time_without_work_is_no_gap() -> None:
    rig = Rig()
    rig.add(1, draft=False, max_new_tokens=1)
    rig.prefill(1)
    assert not rig.state.requests
    rig.now += 50.0
    rig.add(2, draft=False)
    rig.prefill(2)
    assert rig.state.profile.overhead_s == 0.0
