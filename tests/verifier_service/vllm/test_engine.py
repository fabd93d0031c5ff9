"""The vLLM engine's own part, over a core in plain Python: what it promises, plans and commits.

What both engines have in common is in `tests.verifier_service.conformance`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from cluster.errors import BadConstraint, DSparkError, UnknownAdapter
from cluster.wire import FINISH_LENGTH, FINISH_STOP, StepResult
from tests.fakes import VOCAB_SIZE, fake_features, greedy_continuation
from tests.frames import Row, make_admission, make_sampling, make_step
from tests.verifier_service.conformance.rounds import Draft, Rounds
from tests.verifier_service.vllm.fake_core import (
    BAD,
    BLOCK_TOKENS,
    NUM_BLOCKS,
    FakeCore,
    make_engine,
)
from verifier_service.engine import CommittedRows, StepShape
from verifier_service.vllm.engine import VllmEngine

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


@pytest.fixture
def engine(core: FakeCore) -> VllmEngine:
    """6 requests, 32 tokens a step, 48 positions a request, KV for 64."""
    return make_engine(core)


def prompt(rid: int, length: int = 10) -> list[int]:
    """Distinct prompts without a common first block."""
    return [(rid * 13 + place) % VOCAB_SIZE for place in range(length)]


def started(engine: VllmEngine, num: int, **changes: object) -> Rounds:
    """``num`` requests that decode."""
    rounds = Rounds(engine)
    rounds.add(*[make_admission(rid, prompt(rid, 5), **changes) for rid in range(num)])
    while len(rounds.decoding) < num:
        rounds.step(rids=[])
    return rounds


def codes(result: StepResult) -> list[tuple[int, str]]:
    return [(failure.rid, failure.code) for failure in result.failures]


def check_features(rows: Sequence[CommittedRows], ids: Sequence[int]) -> None:
    """Each position's row, once, in order."""
    features = [item.features for item in rows if item.features is not None]
    assert len(features) == len(rows)
    got_TD = torch.cat(features)
    torch.testing.assert_close(got_TD, fake_features(ids, 0, len(got_TD)))


# --- releases ------------------------------------------------------------------------------------


def test_releases(core: FakeCore, engine: VllmEngine) -> None:
    """Twice in one step, unknown ones, and again a step later: the KV comes back once."""
    rounds = started(engine, 3)
    assert engine.step(make_step()).result.free_kv_blocks == NUM_BLOCKS - 6
    result = rounds.step(rids=[], releases=[1, 1, 99])
    assert not result.failures
    assert result.free_kv_blocks == NUM_BLOCKS - 4
    assert sorted(core.held) == [0, 2]
    result = rounds.step(rids=[], releases=[1])
    assert result.free_kv_blocks == NUM_BLOCKS - 4
    rounds.run()
    assert rounds.emitted(0) == greedy_continuation(prompt(0, 5), 8)


def test_a_released_rid_may_come_again_in_the_same_step(engine: VllmEngine) -> None:
    rounds = started(engine, 1)
    again = make_admission(0, prompt(7, 6))
    result = engine.step(make_step(admissions=(again,), releases=np.array([0]))).result
    assert not result.failures
    assert result.token_ids.tolist() == greedy_continuation(prompt(7, 6), 1)
    assert rounds.emitted(0) == greedy_continuation(prompt(0, 5), 1)


def test_release_all_keeps_prefixes(core: FakeCore, engine: VllmEngine) -> None:
    Rounds(engine).run([make_admission(0, PROMPT)])
    started(engine, 2)
    engine.release_all()
    assert not core.held
    assert core.num_forgotten == 0
    rounds = Rounds(engine)
    rounds.run([make_admission(0, PROMPT)])
    assert rounds.num_cached == 8


def test_close(core: FakeCore, engine: VllmEngine) -> None:
    engine.close()
    assert core.closed


# --- admission -----------------------------------------------------------------------------------


def test_kv_is_promised_in_full(core: FakeCore, engine: VllmEngine) -> None:
    """5 + 36 tokens without the last one's keys: 10 blocks each of the 16."""
    rounds = Rounds(engine)
    rounds.add(*[make_admission(rid, prompt(rid, 5), max_new_tokens=36) for rid in range(2)])
    result = rounds.step()
    assert codes(result) == [(1, "Overloaded")]
    assert "10 KV blocks needed, 6 left" in result.failures[0].message
    assert sorted(core.held) == [0]
    small = make_admission(2, prompt(2, 5), max_new_tokens=20)  # 24 positions: exactly what is left
    assert not engine.step(make_step(admissions=(small,))).result.failures
    least = make_admission(3, [1], max_new_tokens=2)
    assert codes(engine.step(make_step(admissions=(least,))).result) == [(3, "Overloaded")]
    freed = engine.step(make_step(admissions=(least,), releases=np.array([2]))).result
    assert not freed.failures


def test_overcommit_promises_more_than_there_is(core: FakeCore) -> None:
    engine = make_engine(core, kv_blocks=2 * NUM_BLOCKS)
    rounds = Rounds(engine)
    rounds.add(*[make_admission(rid, prompt(rid, 5), max_new_tokens=36) for rid in range(4)])
    assert codes(rounds.step()) == [(3, "Overloaded")]
    assert rounds.step(rids=[]).free_kv_blocks == NUM_BLOCKS - 3 * 2, (
        "what is, not what is promised"
    )


@pytest.mark.parametrize("end", ["finished", "released", "broken", "preempted", "failed", "unrun"])
def test_promises_end_with_their_requests(core: FakeCore, engine: VllmEngine, end: str) -> None:
    """However a request goes, all KV can be promised again."""
    rounds = started(engine, 2)
    gone = frozenset({0, 1})
    if end == "finished":
        rounds.run()
    elif end == "released":
        rounds.step(rids=[], releases=[0, 1])
    else:
        core.broken = gone if end == "broken" else core.broken
        core.preempted = gone if end == "preempted" else core.preempted
        core.unrun = gone if end == "unrun" else core.unrun
        core.failed = {rid: BadConstraint("no") for rid in gone if end == "failed"}
        rows = [Row(rid=rid, ids=rounds.ids[rid]) for rid in range(2)]
        assert len(engine.step(make_step(rows)).result.failures) == 2
    assert not core.held
    whole = make_admission(9, prompt(9, 5), max_new_tokens=43)
    result = engine.step(make_step(admissions=(whole,))).result
    assert not result.failures
    assert core.held


def test_refused_admissions_leave_nothing(core: FakeCore) -> None:
    """By name; the others of their step are taken."""
    engine = make_engine(core, adapters=["law"])
    bad = {
        "BadConstraint": make_admission(
            1, [1], constraint_kind="regex", constraint=BAD, stop_ids=np.array([3])
        ),
        "UnknownAdapter": make_admission(2, [1], adapter="poem"),
        "TokenOutOfVocabulary": make_admission(3, [VOCAB_SIZE]),
        "FrameError": make_admission(0, [2, 3]),
        "BadSamplingParameter": make_admission(5, [1], sampling=make_sampling(top_p=-1.0)),
        "PromptTooLong": make_admission(6, [1] * 48),
    }
    good = make_admission(0, PROMPT), make_admission(4, PROMPT, adapter="law")
    step = make_step(admissions=(good[0], *bad.values(), good[1]))
    result = engine.step(step).result
    assert codes(result) == [(admission.rid, code) for code, admission in bad.items()]
    assert sorted(core.held) == [0, 4]
    assert core.held[4].new.adapter == "law"
    with pytest.raises(UnknownAdapter):
        engine.check(bad["UnknownAdapter"])
    with pytest.raises(BadConstraint, match="regex: it is bad"):
        engine.check(bad["BadConstraint"])


def test_too_many_requests(engine: VllmEngine) -> None:
    requests = [make_admission(rid, [rid + 1], max_new_tokens=2) for rid in range(7)]
    result = engine.step(make_step(admissions=tuple(requests))).result
    assert codes(result) == [(6, "Overloaded")]


def test_a_continued_request_gets_the_rest(core: FakeCore, engine: VllmEngine) -> None:
    """Its limit counts from the prompt, the core's from what it is given."""
    text = greedy_continuation(PROMPT, 8)
    rounds = Rounds(engine)
    admission = make_admission(0, [*PROMPT, *text[:5]], num_prompt=len(PROMPT), max_new_tokens=8)
    rounds.add(admission)
    rounds.step(prefill_budget=3)
    new = core.held[0].new
    assert (new.num_prompt, list(new.ids), new.max_tokens) == (10, [*PROMPT, *text[:5]], 3)
    rounds.run()
    assert rounds.emitted(0) == text
    assert rounds.finish[0] == FINISH_LENGTH


# --- plans ---------------------------------------------------------------------------------------


def test_a_plan_holds_the_good_rows(core: FakeCore, engine: VllmEngine) -> None:
    """Not a stale one, not the second of a request, none that passes the room; who has no row is
    not in it."""
    rounds = started(engine, 5)
    ids = rounds.ids
    rows = [
        Row(rid=0, ids=ids[0], draft_ids=[1] * 6),
        Row(rid=0, ids=ids[0]),
        Row(rid=77, ids=[1]),
        Row(rid=1, ids=[*ids[1], 5]),
        Row(rid=2, ids=ids[2], draft_ids=[1] * 6),
        Row(rid=1, ids=ids[1], draft_ids=[2] * 3),
        Row(rid=3, ids=ids[3], draft_ids=[3] * 3),
    ]
    result = engine.step(make_step(rows, prefill_budget=0)).result
    assert codes(result) == [(0, "FrameError"), (77, "StaleFrame"), (1, "StaleFrame")]
    plan = core.plans[-1]
    assert {rid: row.draft_ids for rid, row in plan.rows.items()} == {
        0: (1,) * 6,
        2: (1,) * 6,
        1: (2,) * 3,
        3: (3,) * 3,
    }
    assert (plan.num_row_tokens, plan.prefill_budget) == (7 + 7 + 4 + 4, 0)
    assert sorted(result.rid.tolist()) == [0, 1, 2, 3]
    assert result.num_real_tokens == plan.num_row_tokens
    assert result.num_padded_tokens == plan.num_row_tokens + 3


def test_rows_over_the_step_limit_wait(core: FakeCore) -> None:
    """A later row that is short enough still goes, and the budget is what rows leave."""
    engine = make_engine(core, max_step_tokens=16)
    rounds = started(engine, 4)
    drafts = {0: [1] * 6, 1: [1] * 6, 2: [1] * 5, 3: []}
    rows = [Row(rid=rid, ids=rounds.ids[rid], draft_ids=ids) for rid, ids in drafts.items()]
    late = make_admission(8, prompt(8, 9))
    result = engine.step(make_step(rows, admissions=(late,))).result
    assert codes(result) == [(2, "Overloaded")]
    assert "has 14 tokens; 6 more for request 2" in result.failures[0].message
    assert list(core.plans[-1].rows) == [0, 1, 3]
    assert core.plans[-1].prefill_budget == 1
    assert result.num_prefill_tokens == 1
    assert result.pending_prefill_tokens == 8
    row = Row(rid=2, ids=rounds.ids[2], draft_ids=[1] * 5)
    assert not engine.step(make_step([row])).result.failures, "it was not hurt"


def test_nothing_to_do_is_no_step_of_the_core(core: FakeCore, engine: VllmEngine) -> None:
    """No rows, and no prompt or no budget for one."""
    rounds = started(engine, 2)
    before = len(core.plans)
    result = rounds.step(rids=[])
    assert (result.num_real_tokens, result.num_padded_tokens) == (0, 0)
    rounds.add(make_admission(5, PROMPT))
    assert rounds.step(rids=[], prefill_budget=0).pending_prefill_tokens == 10
    assert len(core.plans) == before
    rounds.step(rids=[], prefill_budget=4)
    assert len(core.plans) == before + 1


# --- commits -------------------------------------------------------------------------------------


def test_chunks(core: FakeCore, engine: VllmEngine) -> None:
    """Each chunk commits its rows at once; the last one brings the first token."""
    rounds = Rounds(engine)
    rounds.add(make_admission(0, PROMPT))
    text = greedy_continuation(PROMPT, 8)
    for first, num in ((0, 4), (4, 4), (8, 2)):
        result = rounds.step(prefill_budget=4)
        rows = rounds.committed[0][-1]
        assert (rows.first_position, len(rows.ids)) == (first, num)
        assert (result.num_prefill_tokens, result.sum_context) == (num, first + num)
        assert result.pending_prefill_tokens == 10 - first - num
        assert rows.prefill_done == (first == 8)
    assert result.token_ids.tolist() == text[:1]
    assert list(rows.ids) == [PROMPT[-1], text[0]]
    rounds.run()
    assert rounds.emitted(0) == text
    check_features(rounds.committed[0], rounds.ids[0])


def test_refused_drafts_are_not_committed(engine: VllmEngine) -> None:
    rounds = Rounds(engine)
    rounds.add(make_admission(0, PROMPT, max_new_tokens=20))
    rounds.step()
    text = greedy_continuation(PROMPT, 20)
    wrong = (text[3] + 1) % VOCAB_SIZE
    result = rounds.step(lambda rid, ids: Draft(ids=[*text[1:3], wrong, *text[4:6]]))
    assert result.num_accepted.tolist() == [2]
    assert result.token_ids.tolist() == text[1:4]
    assert (result.num_real_tokens, result.sum_context) == (6, 16)
    rounds.run()
    assert rounds.emitted(0) == text
    check_features(rounds.committed[0], rounds.ids[0])


@pytest.mark.parametrize("place", range(6))
def test_a_stop_cuts_its_block(core: FakeCore, engine: VllmEngine, place: int) -> None:
    """Rows behind the stop are not committed, though they were computed and right."""
    text = greedy_continuation(PROMPT, 7)
    assert len(set(text)) == 7
    rounds = Rounds(engine)
    stop = np.array([text[place + 1]], np.int32)
    rounds.add(make_admission(0, PROMPT, max_new_tokens=20, stop_ids=stop))
    rounds.step()
    result = rounds.step(lambda rid, ids: Draft(ids=text[1:7]))
    assert result.token_ids.tolist() == text[1 : place + 2]
    assert rounds.finish[0] == FINISH_STOP
    assert list(rounds.committed[0][-1].ids) == text[1 : place + 2]
    check_features(rounds.committed[0], rounds.ids[0])
    assert not core.held
    assert result.free_kv_blocks == NUM_BLOCKS


def test_the_length_cuts_drafts_before_they_run(core: FakeCore, engine: VllmEngine) -> None:
    text = greedy_continuation(PROMPT, 7)
    rounds = Rounds(engine)
    rounds.add(make_admission(0, PROMPT, max_new_tokens=4))
    rounds.step()
    rounds.step(lambda rid, ids: Draft(ids=text[1:7]))
    assert core.plans[-1].rows[0].draft_ids == tuple(text[1:3])
    assert rounds.emitted(0) == text[:4]
    assert rounds.finish[0] == FINISH_LENGTH


# --- prefix cache --------------------------------------------------------------------------------


def test_a_hit_brings_its_rows(core: FakeCore, engine: VllmEngine) -> None:
    """Positions, ids and digest of the first commit cover what was cached; `Rounds` checks them."""
    first = Rounds(engine)
    first.run([make_admission(0, PROMPT)])
    second = Rounds(engine)
    known = [*first.ids[0], 3, 4, 5]
    second.add(make_admission(1, known))
    result = second.step(prefill_budget=2)
    # The last token was never computed: 17 positions of the first turn were.
    assert result.num_cached_tokens == 16
    assert (result.num_prefill_tokens, result.sum_context) == (2, 18)
    rows = second.committed[1][0]
    assert (rows.first_position, len(rows.ids)) == (0, 18)
    assert list(rows.ids) == known[1:19]
    assert second.step(prefill_budget=1).num_cached_tokens == 0, "counted once"
    second.run()
    check_features(second.committed[1], second.ids[1])
    assert second.emitted(1) == greedy_continuation(known, 8)


def test_a_hit_ends_where_rows_do(core: FakeCore) -> None:
    """vLLM's KV lives longer than our rows: what lies behind them is computed again."""
    engine = make_engine(core, rows_bytes=2 * BLOCK_TOKENS * 2 * 4)
    ids = prompt(0, 18)
    Rounds(engine).run([make_admission(0, ids)])
    assert core.num_found(ids) == 16
    rounds = Rounds(engine)
    rounds.run([make_admission(1, ids)])
    assert rounds.num_cached == 8
    check_features(rounds.committed[1], rounds.ids[1])


def test_without_features_all_of_a_hit_counts(core: FakeCore) -> None:
    core.has_projection = False
    engine = make_engine(core)
    Rounds(engine).run([make_admission(0, PROMPT)])
    rounds = Rounds(engine)
    rounds.run([make_admission(1, PROMPT)])
    assert rounds.num_cached == 8
    assert all(rows.features is None for rows in rounds.committed[1])
    assert not engine.step(make_step()).gauges


def test_adapters_share_nothing(core: FakeCore) -> None:
    """Neither the core's KV nor our rows, though the ids are the same."""
    engine = make_engine(core, adapters=["law", "poem"])
    for rid, adapter in enumerate(("law", "", "poem")):
        rounds = Rounds(engine)
        rounds.run([make_admission(rid, PROMPT, adapter=adapter)])
        assert rounds.num_cached == 0, adapter
    core.cached.add(("poem", tuple(PROMPT[:4])))
    core.cached |= {("", ids) for _, ids in core.cached}
    rounds = Rounds(engine)
    rounds.run([make_admission(3, PROMPT, adapter="poem")])
    assert rounds.num_cached == 8


def test_gauges_tell_of_rows(engine: VllmEngine) -> None:
    assert engine.step(make_step()).gauges == {"prefix_rows_bytes": 0, "prefix_rows_evicted": 0}
    Rounds(engine).run([make_admission(0, PROMPT)])
    # 17 positions computed, 4 blocks of 4 rows of 2 floats.
    assert engine.step(make_step()).gauges["prefix_rows_bytes"] == 4 * BLOCK_TOKENS * 2 * 4


# --- what goes wrong -----------------------------------------------------------------------------


def test_a_broken_request_is_alone(core: FakeCore, engine: VllmEngine) -> None:
    """It ends with an error and leaves neither KV nor rows; the others of its step go on."""
    rounds = Rounds(engine)
    rounds.add(*[make_admission(rid, prompt(rid)) for rid in range(3)])
    rounds.step()
    core.broken = frozenset({1})
    rows = [Row(rid=1, ids=rounds.ids[1], draft_ids=[4, 4])]
    result = rounds.step(rids=[0, 2], beside=rows)
    assert codes(result) == [(1, "DSparkError")]
    assert "not finite" in result.failures[0].message
    assert sorted(result.rid.tolist()) == [0, 2]
    assert core.dropped_broken == [1]
    again = Rounds(engine)
    again.run([make_admission(1, prompt(1))])
    assert again.num_cached == 0
    assert again.emitted(1) == greedy_continuation(prompt(1), 8)
    core.cached |= {("", tuple(prompt(1)[:4])), ("", tuple(prompt(1)[:8]))}
    rounds.run()
    assert rounds.emitted(0) == greedy_continuation(prompt(0), 8)


def test_rows_of_a_broken_request_are_forgotten(core: FakeCore, engine: VllmEngine) -> None:
    """Even where the core went on to find its KV."""
    rounds = started(engine, 1)
    Rounds(engine).run([make_admission(5, PROMPT)])
    core.broken = frozenset({6})
    result = engine.step(make_step(admissions=(make_admission(6, PROMPT),))).result
    assert codes(result) == [(6, "DSparkError")]
    core.cached |= {("", tuple(PROMPT[:4])), ("", tuple(PROMPT[:8]))}
    again = Rounds(engine)
    again.run([make_admission(7, PROMPT)])
    assert again.num_cached == 0
    assert rounds.decoding == {0}


def test_a_preempted_request_is_stale(core: FakeCore, engine: VllmEngine) -> None:
    """In a row, held back or in prefill: the lane admits it again, and it says the same."""
    rounds = started(engine, 3)
    rounds.add(make_admission(3, prompt(3)))
    rounds.step(rids=[], prefill_budget=3)
    core.preempted = frozenset({1, 2, 3})
    result = rounds.step(rids=[0, 1], prefill_budget=0)
    assert sorted(codes(result)) == [(rid, "StaleFrame") for rid in (1, 2, 3)]
    assert "lost its KV" in result.failures[0].message
    assert result.num_preempted == 3
    assert sorted(core.held) == [0]
    rounds.run()
    for rid in range(4):
        length = 5 if rid < 3 else 10
        assert rounds.emitted(rid) == greedy_continuation(prompt(rid, length), 8)


def test_a_row_that_was_not_run_is_stale(core: FakeCore, engine: VllmEngine) -> None:
    rounds = started(engine, 2)
    core.unrun = frozenset({1})
    result = rounds.step()
    assert codes(result) == [(1, "StaleFrame")]
    assert "has not run request 1" in result.failures[0].message
    assert result.num_preempted == 0
    assert sorted(core.held) == [0]
    rounds.run()
    assert rounds.emitted(1) == greedy_continuation(prompt(1, 5), 8)


def test_a_constraint_that_fails_late(core: FakeCore, engine: VllmEngine) -> None:
    """Its error is the request's, and it is not there any more."""
    rounds = started(engine, 1)
    core.failed = {4: BadConstraint("does not compile")}
    late = make_admission(4, PROMPT, constraint_kind="json_object")
    rows = [Row(rid=0, ids=rounds.ids[0])]
    result = engine.step(make_step(rows, admissions=(late,))).result
    assert codes(result) == [(4, "BadConstraint")]
    assert result.rid.tolist() == [0]
    assert sorted(core.held) == [0]
    row = Row(rid=4, ids=PROMPT)
    assert codes(engine.step(make_step([row])).result) == [(4, "StaleFrame")]


@pytest.mark.parametrize("error", [RuntimeError("device lost"), DSparkError("no")])
def test_a_core_that_raises(core: FakeCore, engine: VllmEngine, error: Exception) -> None:
    """The step fails as a whole: its caller drops everything, and the engine serves again."""
    rounds = started(engine, 2)
    core.raises = error
    rows = [Row(rid=rid, ids=rounds.ids[rid]) for rid in range(2)]
    with pytest.raises(type(error), match=str(error)):
        engine.step(make_step(rows))
    engine.release_all()
    assert not core.held
    result = engine.step(make_step()).result
    assert result.free_kv_blocks == NUM_BLOCKS
    again = Rounds(engine)
    again.run([make_admission(0, PROMPT)])
    assert again.emitted(0) == greedy_continuation(PROMPT, 8)


def test_measuring_needs_an_empty_engine(engine: VllmEngine) -> None:
    started(engine, 1)
    with pytest.raises(AssertionError, match="requests in hand"):
        engine.measure_step(StepShape(num_tokens=1, context=0))
