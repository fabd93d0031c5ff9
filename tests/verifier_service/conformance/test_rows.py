"""What a step may ask for, what it gets, and what is refused without touching anything else."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cluster import digest
from cluster.wire import decode, encode
from tests.frames import Row, make_admission, make_sampling, make_step
from tests.verifier_service.conformance.drafts import another
from tests.verifier_service.conformance.rounds import Draft, Rounds
from tests.verifier_service.conformance.targets import Target
from tests.verifier_service.torch_targets import VOCAB_SIZE, prompt
from verifier_service.engine import Engine


def started(engine: Engine, lengths: Sequence[int], *, num_new: int = 16) -> Rounds:
    """Requests 0, 1, ... that have been prefilled, one after the other, and nothing more."""
    rounds = Rounds(engine)
    for rid, length in enumerate(lengths):
        rounds.add(make_admission(rid, prompt(length, 40 + rid), max_new_tokens=num_new))
        while rid not in rounds.decoding:
            rounds.step(rids=[])
    return rounds


def test_nothing_to_do(engine: Engine) -> None:
    """An empty step, with and without requests that are held back."""
    result = engine.step(make_step(lane_epoch=3, step_id=7)).result
    assert (result.lane_epoch, result.step_id) == (3, 7)
    assert result.free_kv_blocks == engine.limits.kv_blocks
    rounds = started(engine, [9, 4])
    known = [list(ids) for ids in rounds.ids.values()]
    for _ in range(3):
        result = rounds.step(rids=[])
        assert result.rid.tolist() == []
        assert not result.failures
        assert (result.num_real_tokens, result.num_prefill_tokens) == (0, 0)
        assert (result.sum_context, result.num_pairs) == (0, 0)
        assert result.step_s >= 0
    assert list(rounds.ids.values()) == known


def test_who_has_no_row_is_held_back(engine: Engine, tiny: Target) -> None:
    rounds = started(engine, [9, 4, 12])
    for rids in ([1], [0, 2], [1, 2], [2], [0], [0, 1, 2]):
        assert sorted(rounds.step(rids=rids).rid.tolist()) == rids
    rounds.run()
    for rid, length in enumerate((9, 4, 12)):
        assert rounds.emitted(rid) == tiny.greedy(prompt(length, 40 + rid), 16)


def test_what_ran_is_reported(engine: Engine) -> None:
    """Real tokens, context and pairs of a verify row, drafts that are refused included."""
    rounds = started(engine, [9])
    result = rounds.step(lambda rid, ids: Draft(ids=[1, 2, 3]))
    assert result.num_real_tokens == 4
    assert result.num_padded_tokens >= 4
    assert result.num_prefill_tokens == 0
    assert result.sum_context == 13
    assert result.num_pairs == 10 + 11 + 12 + 13
    assert result.step_s > 0
    assert decode(encode(result)) == result


# --- rows that do not fit ------------------------------------------------------------------------


def bad_row(fault: str, known: dict[int, list[int]]) -> Row:
    """A row of request 1 that cannot be served, or of one that is not there or in prefill."""
    ids = known[1]
    behind = {
        "an anchor before": ids[:-1],
        "an anchor behind": [*ids, 5],
        "another anchor token": [*ids[:-1], another(ids[-1])],
        "another prompt": [another(ids[0]), *ids[1:]],
    }
    drafts = {"a draft past the vocabulary": [1, VOCAB_SIZE], "a draft below it": [-1]}
    if fault == "in prefill":
        return Row(rid=3, ids=known[3])
    rid = 77 if fault == "unknown" else 1
    return Row(rid=rid, ids=behind.get(fault, ids), draft_ids=drafts.get(fault, ()))


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("unknown", "StaleFrame"),
        ("in prefill", "StaleFrame"),
        ("an anchor before", "StaleFrame"),
        ("an anchor behind", "StaleFrame"),
        ("another anchor token", "StaleFrame"),
        ("another prompt", "StaleFrame"),
        ("a draft past the vocabulary", "FrameError"),
        ("a draft below it", "FrameError"),
    ],
)
def test_a_bad_row_changes_nothing(engine: Engine, tiny: Target, fault: str, code: str) -> None:
    """The other rows of its step go on, and its own request too, with the next good row."""
    rounds = started(engine, [9, 17, 4])
    rounds.add(make_admission(3, prompt(40, 43), max_new_tokens=4))
    rounds.step(rids=[], prefill_budget=7)
    row = bad_row(fault, rounds.ids)
    result = rounds.step(rids=[0, 2], beside=[row], prefill_budget=0)
    assert [(failure.rid, failure.code) for failure in result.failures] == [(row.rid, code)]
    assert sorted(result.rid.tolist()) == [0, 2]
    rounds.run()
    for rid, length in enumerate((9, 17, 4)):
        assert rounds.emitted(rid) == tiny.greedy(prompt(length, 40 + rid), 16)
    assert rounds.emitted(3) == tiny.greedy(prompt(40, 43), 4)


def test_a_late_block_is_stale(engine: Engine, tiny: Target) -> None:
    """The block for an anchor that a plain row has passed by, on its way twice."""
    rounds = started(engine, [9])
    late = Draft(ids=tiny.greedy(rounds.ids[0], 4), behind=list(rounds.ids[0]))
    rounds.step()
    for _ in range(2):
        result = rounds.step(lambda rid, ids: late)
        assert result.rid.tolist() == []
    assert rounds.num_stale == 2
    rounds.run()
    assert rounds.emitted(0) == tiny.greedy(prompt(9, 40), 16)


def ahead_of(rounds: Rounds, rid: int, num_unknown: int = 1) -> np.ndarray[Any, Any]:
    """Digest of a row that does not know the last tokens of its request."""
    ids = rounds.ids[rid]
    return np.array([digest.of(ids[: len(ids) - num_unknown])], np.uint64)


def test_a_row_sent_ahead_of_its_anchor(engine: Engine, tiny: Target) -> None:
    """It knows the text up to its anchor, which the step before has emitted. Once that has ended
    the request, the row is stale, like any row of a request that is gone."""
    rounds = started(engine, [9, 4], num_new=8)
    rounds.step(rids=[0])
    while 0 in rounds.decoding:
        assert not rounds.step(rids=[0], digest=ahead_of(rounds, 0)).failures
    assert rounds.emitted(0) == tiny.greedy(prompt(9, 40), 8)
    gone = Row(rid=0, ids=rounds.ids[0])
    prefix = np.concatenate([ahead_of(rounds, 1, 0), ahead_of(rounds, 0)])
    result = rounds.step(rids=[1], beside=[gone], digest=prefix)
    assert [(failure.rid, failure.code) for failure in result.failures] == [(0, "StaleFrame")]
    rounds.run()
    assert rounds.emitted(1) == tiny.greedy(prompt(4, 41), 8)


@pytest.mark.parametrize("fault", ["drafts", "two tokens", "another text", "behind a prompt"])
def test_what_a_row_ahead_cannot_be(engine: Engine, tiny: Target, fault: str) -> None:
    """Drafts behind a token that nobody knew; a token before last that is unknown, too; another
    text than the request's."""
    rounds = started(engine, [9])
    drafts: list[int] = []
    if fault == "two tokens":
        drafts = tiny.greedy(rounds.ids[0], 1)
    if fault != "behind a prompt":
        rounds.step(lambda rid, ids: Draft(ids=drafts))
    ids = rounds.ids[0]
    prefix = {
        "another text": [*ids[:-2], another(ids[-2])],
        "two tokens": ids[:-2],
        "behind a prompt": ids[:-2],
    }.get(fault, ids[:-1])
    row = make_step([Row(rid=0, ids=ids, draft_ids=[1] if fault == "drafts" else ())])
    result = engine.step(
        dataclasses.replace(row, digest=np.array([digest.of(prefix)], np.uint64))
    ).result
    code = "FrameError" if fault == "drafts" else "StaleFrame"
    assert [(failure.rid, failure.code) for failure in result.failures] == [(0, code)]
    rounds.run()
    assert rounds.emitted(0) == tiny.greedy(prompt(9, 40), 16)


def test_two_rows_of_one_request(engine: Engine, tiny: Target) -> None:
    """The first counts; the second, which would judge the same anchor again, is refused."""
    rounds = started(engine, [9, 4])
    text = tiny.greedy(prompt(9, 40), 16)
    rows = [
        Row(rid=0, ids=rounds.ids[0], draft_ids=text[1:3]),
        Row(rid=1, ids=rounds.ids[1]),
        Row(rid=0, ids=rounds.ids[0], draft_ids=[another(text[1])]),
    ]
    result = engine.step(make_step(rows)).result
    assert [(failure.rid, failure.code) for failure in result.failures] == [(0, "FrameError")]
    assert dict(zip(result.rid.tolist(), result.num_emitted.tolist(), strict=True)) == {0: 3, 1: 1}
    at = result.rid.tolist().index(0)
    assert int(result.digest[at]) == digest.of([*rounds.ids[0], *text[1:4]])


@pytest.mark.parametrize("fault", ["no mass", "repeated", "no law"])
def test_a_bad_q_is_one_rows_failure(engine: Engine, fault: str) -> None:
    sampling = make_sampling(temperature=1.0, mode="rejection", seed=3)
    rounds = Rounds(engine)
    rounds.add(*[make_admission(rid, prompt(8), sampling=sampling) for rid in range(3)])
    rounds.step(rids=[])
    ids = {"no mass": [8, 9], "repeated": [6, 6]}.get(fault, [6, 9])
    probs = [0.5, 0.4] if fault == "no law" else [0.5, 0.5]
    q_ids = np.array([[5, 9], [6, 9], [5, 9], ids], np.int32)
    q_probs = np.array([*[[0.5, 0.5]] * 3, probs], np.float32)
    rows = [
        Row(rid=rid, ids=rounds.ids[rid], draft_ids=[5, 6][:num])
        for rid, num in enumerate((2, 0, 2))
    ]
    step = make_step(rows, has_q=np.array([1, 0, 1], np.uint8), q_ids=q_ids, q_probs=q_probs)
    result = engine.step(step).result
    assert sorted(result.rid.tolist()) == [0, 1]
    assert [(failure.rid, failure.code) for failure in result.failures] == [(2, "FrameError")]


def test_more_drafts_than_any_drafter_sends(engine: Engine, tiny: Target) -> None:
    """An engine need not verify them all; what it says is right."""
    ids = prompt(4, 90)
    text = tiny.greedy(ids, 44)
    rounds = Rounds(engine)
    rounds.run(
        [make_admission(0, ids, max_new_tokens=44)],
        lambda rid, known: Draft(ids=text[len(known) - 4 :][:40]),
    )
    assert rounds.emitted(0) == text
    assert rounds.num_accepted[0] >= 20


# --- limits of a step ----------------------------------------------------------------------------


def test_rows_past_the_step_limit_wait(engine: Engine, tiny: Target) -> None:
    """Whole rows are served, in order, as far as they fit; the others can go again."""
    num_rows, num_draft = 9, 5
    rounds = started(engine, [4] * num_rows, num_new=12)
    result = rounds.step(lambda rid, ids: Draft(ids=[1] * num_draft))
    fitting = engine.limits.max_step_tokens // (num_draft + 1)
    assert fitting < num_rows
    assert result.num_real_tokens <= engine.limits.max_step_tokens
    assert sorted(result.rid.tolist()) == list(range(fitting))
    assert {(f.rid, f.code) for f in result.failures} == {
        (rid, "Overloaded") for rid in range(fitting, num_rows)
    }
    rounds.run()
    for rid in range(num_rows):
        assert rounds.emitted(rid) == tiny.greedy(prompt(4, 40 + rid), 12)


def test_verify_rows_come_before_prefill(engine: Engine) -> None:
    rounds = started(engine, [4] * 6)
    rounds.add(make_admission(9, prompt(50, 99), max_new_tokens=2))
    result = rounds.step(lambda rid, ids: Draft(ids=[1, 2, 3]), prefill_budget=500)
    assert sorted(result.rid.tolist()) == list(range(6))
    assert result.num_real_tokens == engine.limits.max_step_tokens
    assert result.num_prefill_tokens == engine.limits.max_step_tokens - 24
    assert result.pending_prefill_tokens == 50 - result.num_prefill_tokens


def test_prefill_is_first_in_first_out_under_the_budget(engine: Engine) -> None:
    rounds = Rounds(engine)
    rounds.add(*[make_admission(rid, prompt(n, 60 + rid)) for rid, n in ((4, 30), (2, 10), (9, 5))])
    first = rounds.step(prefill_budget=16)
    assert (first.num_prefill_tokens, first.pending_prefill_tokens) == (16, 29)
    assert first.rid.tolist() == []
    second = rounds.step(rids=[], prefill_budget=16)
    assert second.rid.tolist() == [4]
    assert (second.num_emitted.tolist(), second.num_accepted.tolist()) == ([1], [0])
    assert (second.num_prefill_tokens, second.pending_prefill_tokens) == (16, 13)
    third = rounds.step(rids=[4], prefill_budget=16)
    assert third.rid.tolist() == [4, 2, 9]  # verify rows, then finished prefills
    assert (third.num_prefill_tokens, third.pending_prefill_tokens) == (13, 0)
    assert third.num_real_tokens == 14
    assert third.sum_context == 31 + 10 + 5


def test_no_prefill_budget_leaves_prompts_waiting(engine: Engine) -> None:
    rounds = started(engine, [4])
    rounds.add(make_admission(1, prompt(9, 70)))
    result = rounds.step(prefill_budget=0)
    assert result.rid.tolist() == [0]
    assert (result.num_real_tokens, result.pending_prefill_tokens) == (1, 9)
    assert rounds.step(rids=[]).rid.tolist() == [1]
