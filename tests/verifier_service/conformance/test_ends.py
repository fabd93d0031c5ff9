"""How requests end: stop ids, lengths, cancels; and that nothing of them stays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cluster.wire import FINISH_LENGTH, FINISH_STOP
from tests.frames import Row, make_admission, make_step
from tests.verifier_service.conformance.drafts import MixedDrafts
from tests.verifier_service.conformance.rounds import Draft, Rounds
from tests.verifier_service.conformance.targets import Target
from tests.verifier_service.torch_targets import VOCAB_SIZE, prompt
from verifier_service.engine import Engine
from verifier_service.live_request import blocks_for

MAX_MODEL_LEN = 64


def varied(target: Target, num_tokens: int) -> tuple[list[int], list[int]]:
    """A prompt behind which the target says ``num_tokens`` different tokens, and those."""
    for seed in range(100, 200):
        ids = prompt(9, seed)
        text = target.greedy(ids, num_tokens)
        if len(set(text)) == num_tokens:
            return ids, text
    raise AssertionError("the target repeats itself behind every prompt")


@pytest.mark.parametrize("place", range(6))
def test_stop_id_inside_an_accepted_block(engine: Engine, tiny: Target, place: int) -> None:
    """Nothing behind the stop is emitted or committed, though the whole block was right."""
    ids, text = varied(tiny, 7)
    stop = np.array([text[place + 1]], np.int32)
    rounds = Rounds(engine)
    rounds.add(make_admission(0, ids, max_new_tokens=20, stop_ids=stop))
    rounds.step()
    result = rounds.step(lambda rid, known: Draft(ids=text[1:6]))
    assert result.token_ids.tolist() == text[1 : place + 2]
    assert result.finish.tolist() == [FINISH_STOP]
    assert result.num_accepted.tolist() == [min(place + 1, 5)]
    assert list(rounds.committed[0][-1].ids) == text[1 : place + 2]
    assert result.free_kv_blocks == engine.limits.kv_blocks


def test_first_token_can_be_the_last(engine: Engine, tiny: Target) -> None:
    ids, text = varied(tiny, 3)
    stop = np.array(text[:1], np.int32)
    rounds = Rounds(engine)
    rounds.add(
        make_admission(0, ids, max_new_tokens=1),
        make_admission(1, ids, max_new_tokens=9, stop_ids=stop),
        make_admission(2, ids, max_new_tokens=9),
    )
    result = rounds.step()
    assert result.finish.tolist() == [FINISH_LENGTH, FINISH_STOP, 0]
    assert result.token_ids.tolist() == text[:1] * 3


def test_a_stop_on_the_last_allowed_place_is_a_stop(engine: Engine, tiny: Target) -> None:
    ids, text = varied(tiny, 4)
    stop = np.array(text[3:], np.int32)
    rounds = Rounds(engine)
    drafter = lambda rid, known: Draft(ids=text[1:4])  # noqa: E731
    rounds.run([make_admission(0, ids, max_new_tokens=4, stop_ids=stop)], drafter)
    assert rounds.emitted(0) == text
    assert rounds.finish[0] == FINISH_STOP


def test_drafts_past_the_last_token_are_not_computed(engine: Engine, tiny: Target) -> None:
    ids, text = varied(tiny, 7)
    rounds = Rounds(engine)
    rounds.add(make_admission(0, ids, max_new_tokens=4))
    rounds.step()
    result = rounds.step(lambda rid, known: Draft(ids=text[1:7]))
    assert result.num_real_tokens == 3
    assert result.token_ids.tolist() == text[1:4]
    assert result.num_accepted.tolist() == [2]
    assert result.finish.tolist() == [FINISH_LENGTH]


def test_cancel_frees_kv_at_once(engine: Engine) -> None:
    """Requests that decode, that are in prefill and that have just come in the same step; what is
    free is known from the answer to the very step that releases them."""
    rounds, limits = Rounds(engine), engine.limits
    rounds.add(make_admission(0, prompt(40, 0), max_new_tokens=20))
    rounds.step(prefill_budget=48)
    rounds.step()
    rounds.add(make_admission(1, prompt(33, 1), max_new_tokens=20))
    result = rounds.step(prefill_budget=20)
    assert result.pending_prefill_tokens == 13
    assert result.free_kv_blocks <= limits.kv_blocks - blocks_for(42, limits) - blocks_for(
        20, limits
    )
    result = rounds.step(releases=[1], rids=[])
    assert result.pending_prefill_tokens == 0
    # Of the other one there are 42 positions, and never more than 59.
    held = limits.kv_blocks - result.free_kv_blocks
    assert blocks_for(42, limits) <= held <= blocks_for(59, limits)
    result = rounds.step(releases=[0, 0, 77], rids=[])
    assert not result.failures
    assert result.free_kv_blocks == engine.limits.kv_blocks
    late = engine.step(make_step([Row(rid=0, ids=rounds.ids[0])])).result
    assert [failure.code for failure in late.failures] == ["StaleFrame"]


def test_release_all_leaves_nothing(engine: Engine) -> None:
    rounds = Rounds(engine)
    rounds.add(*[make_admission(rid, prompt(20, rid), max_new_tokens=20) for rid in range(5)])
    rounds.step(prefill_budget=30)
    engine.release_all()
    result = engine.step(make_step()).result
    assert (result.free_kv_blocks, result.pending_prefill_tokens) == (engine.limits.kv_blocks, 0)
    engine.release_all()
    Rounds(engine).run([make_admission(0, prompt(20))])


def test_to_exactly_max_model_len_with_drafts_pending(engine: Engine, tiny: Target) -> None:
    """The last positions of the model are used; drafts that would pass them are refused."""
    assert engine.limits.max_model_len == MAX_MODEL_LEN
    ids = prompt(44, 5)
    rounds = Rounds(engine)
    rounds.add(make_admission(0, ids, max_new_tokens=1000))
    rounds.step()
    while 0 not in rounds.finish:
        room = MAX_MODEL_LEN - len(rounds.ids[0])
        row = Row(rid=0, ids=rounds.ids[0], draft_ids=[7] * (room + 1))
        result = engine.step(make_step([row])).result
        assert [failure.code for failure in result.failures] == ["FrameError"]
        rounds.step(lambda rid, known, room=room: Draft(ids=([7] * room)[:6]))  # type: ignore[misc]
    assert rounds.emitted(0) == tiny.greedy(ids, MAX_MODEL_LEN - 44)
    assert rounds.finish[0] == FINISH_LENGTH


def fill_up(engine: Engine, target: Target, num_requests: int) -> None:
    """Requests that end at exactly the model's length, drafts pending, a tenth of them cancelled
    on their way: all KV comes back, and every text is the target's."""
    lengths = np.random.default_rng(0).integers(MAX_MODEL_LEN - 24, MAX_MODEL_LEN, num_requests)
    starts = [prompt(int(length), seed % 20) for seed, length in enumerate(lengths)]
    truth = {tuple(ids): ids + target.greedy(ids, MAX_MODEL_LEN - len(ids)) for ids in starts}
    drafts = MixedDrafts(
        {rid: truth[tuple(ids)] for rid, ids in enumerate(starts)},
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
    )
    rounds = Rounds(engine)
    rounds.add(*[make_admission(i, ids, max_new_tokens=1000) for i, ids in enumerate(starts)])
    cancelled: set[int] = set()
    while len(rounds.finish) + len(cancelled) < num_requests:
        leaving = [r for r in rounds.decoding if r % 10 == 3 and len(rounds.ids[r]) > 56][:1]
        rids: Sequence[int] = sorted(rounds.decoding - set(leaving))
        rounds.step(drafts, rids=rids, releases=leaving, prefill_budget=64)
        cancelled.update(leaving)
    assert len(cancelled) > num_requests / 20
    assert set(rounds.finish.values()) == {FINISH_LENGTH}
    for rid in rounds.finish:
        assert len(rounds.ids[rid]) == MAX_MODEL_LEN
        if rounds.ids[rid] != truth[tuple(starts[rid])]:
            assert target.reference.greedy_ties(starts[rid], rounds.emitted(rid)) > 0
    assert rounds.step().free_kv_blocks == engine.limits.kv_blocks


def test_many_requests_to_the_end(engine: Engine, tiny: Target) -> None:
    fill_up(engine, tiny, 40)


@pytest.mark.slow
def test_a_thousand_requests_to_the_end(engine: Engine, tiny: Target) -> None:
    fill_up(engine, tiny, 1000)
