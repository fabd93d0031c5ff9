"""The torch engine behind the `Engine` seam: rounds, prefill, stops, limits, refusals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster import digest
from cluster.errors import (
    BadConstraint,
    DSparkError,
    InvalidRequest,
    PromptTooLong,
    Unsupported,
)
from cluster.wire import FINISH_LENGTH, FINISH_STOP, decode, encode
from tests.frames import Row, make_sampling, make_step
from tests.verifier_service.torch_targets import (
    VOCAB_SIZE,
    Lane,
    admission,
    make_engine,
    prompt,
    reference_greedy,
    reference_logits,
    save_llama,
)
from verifier_service.engine import Engine, StepShape
from verifier_service.profiling import measure_profile
from verifier_service.torch_engine import TorchEngine

NUM_NEW = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("target")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return save_llama(folder)


@pytest.fixture
def engine(folder: Path, reference: Any) -> TorchEngine:
    del reference  # it wrote the folder
    return make_engine(folder)


@pytest.fixture(scope="module")
def texts(reference: Any) -> dict[int, tuple[list[int], list[int]]]:
    """Prompt and greedy continuation of five requests."""
    prompts = {rid: prompt(length, rid) for rid, length in enumerate((1, 17, 40, 5, 90))}
    return {rid: (ids, reference_greedy(reference, ids, NUM_NEW)) for rid, ids in prompts.items()}


def garbage(rid: int, ids: Sequence[int]) -> list[int]:
    """Random drafts of every length up to 7."""
    rng = np.random.default_rng(1000 * rid + len(ids))
    return rng.integers(0, VOCAB_SIZE, rng.integers(0, 8)).tolist()


def is_engine(engine: Engine) -> Engine:
    """Fails to type-check if the class drifts from the seam."""
    return engine


# --- the text is the target's ------------------------------------------------------------


@pytest.mark.parametrize("prefill_budget", [7, 128])
@pytest.mark.parametrize("drafts", ["none", "garbage", "perfect", "half right"])
def test_greedy_text(
    drafts: str,
    prefill_budget: int,
    engine: TorchEngine,
    texts: dict[int, tuple[list[int], list[int]]],
) -> None:
    """Five requests at once, whatever is drafted and however prompts are cut."""

    def perfect(rid: int, ids: Sequence[int]) -> list[int]:
        start, text = texts[rid]
        done = len(ids) - len(start)
        return text[done : done + 5]

    def half_right(rid: int, ids: Sequence[int]) -> list[int]:
        block = perfect(rid, ids)
        return [t if k < 2 else (t + 1) % VOCAB_SIZE for k, t in enumerate(block)]

    drafters = {
        "none": lambda rid, ids: (),
        "garbage": garbage,
        "perfect": perfect,
        "half right": half_right,
    }
    lane = Lane(is_engine(engine))  # type: ignore[arg-type]
    pending = [admission(rid, ids, NUM_NEW) for rid, (ids, _) in texts.items()]
    lane.step(pending, drafter=drafters[drafts], prefill_budget=prefill_budget)
    num_steps = 1
    while len(lane.finish) < len(texts):
        lane.step(drafter=drafters[drafts], prefill_budget=prefill_budget)
        num_steps += 1
        assert num_steps < 200
    for rid, (ids, text) in texts.items():
        assert lane.emitted(rid, len(ids)) == text
        assert lane.finish[rid] == FINISH_LENGTH
    if drafts == "perfect":
        # 31 tokens behind the first: 5 rounds of 6, and a last one that needs no draft
        assert all(count == 25 for count in lane.accepted.values())
    if drafts == "half right":
        assert all(0 < count <= 2 * NUM_NEW / 3 for count in lane.accepted.values())
    assert engine.step(make_step()).result.free_kv_blocks == engine.limits.kv_blocks


def test_requests_join_and_leave_in_mid_flight(
    engine: TorchEngine, texts: dict[int, tuple[list[int], list[int]]]
) -> None:
    lane = Lane(engine)
    for rid, (ids, _) in texts.items():
        lane.step([admission(rid, ids, NUM_NEW - 5 * rid)], drafter=garbage)
        lane.step(drafter=garbage)
    while len(lane.finish) < len(texts):
        lane.step(drafter=garbage)
    for rid, (ids, text) in texts.items():
        assert lane.emitted(rid, len(ids)) == text[: NUM_NEW - 5 * rid]


def test_continuation_after_a_fault(
    engine: TorchEngine, texts: dict[int, tuple[list[int], list[int]]]
) -> None:
    """Re-admitted with what it had emitted, it says the same rest, counted from the prompt."""
    ids, text = texts[2]
    lane = Lane(engine)
    lane.run([dataclasses.replace(admission(7, ids + text[:20], NUM_NEW), num_prompt=len(ids))])
    assert lane.emitted(7, len(ids)) == text


def test_coupled_text_does_not_depend_on_drafts(engine: TorchEngine) -> None:
    sampling = make_sampling(temperature=1.0, seed=11)
    said = []
    for drafter in (lambda rid, ids: (), garbage):
        lane = Lane(engine)
        lane.run([admission(1, prompt(20), 24, sampling=sampling)], drafter)
        said.append(lane.emitted(1, 20))
    assert said[0] == said[1]
    assert len(set(said[0])) > 5


def test_logprobs_are_the_targets(engine: TorchEngine, reference: Any) -> None:
    lane, ids = Lane(engine), prompt(9)
    asked, not_asked = make_sampling(logprobs=True), make_sampling()
    lane.run([admission(0, ids, 6, sampling=asked), admission(1, ids, 6, sampling=not_asked)])
    law = reference_logits(reference, lane.ids[0][:-1]).log_softmax(-1)[8:]
    want = law[torch.arange(6), torch.tensor(lane.emitted(0, 9))]
    torch.testing.assert_close(torch.tensor(lane.logprobs[0]), want, atol=1e-4, rtol=0)
    assert lane.logprobs[1] == [0.0] * 6


# --- prefill -------------------------------------------------------------------------------


def test_prefill_is_first_in_first_out_under_the_budget(engine: TorchEngine) -> None:
    lane = Lane(engine)
    admissions = [admission(rid, prompt(length, rid)) for rid, length in ((4, 30), (2, 10), (9, 5))]
    first = lane.step(admissions, prefill_budget=16)
    assert (first.num_prefill_tokens, first.pending_prefill_tokens) == (16, 29)
    assert first.rid.tolist() == []
    second = lane.step(rids=[], prefill_budget=16)
    assert second.rid.tolist() == [4]
    assert second.num_emitted.tolist() == [1]
    assert second.num_accepted.tolist() == [0]
    assert (second.num_prefill_tokens, second.pending_prefill_tokens) == (16, 13)
    third = lane.step(rids=[4], prefill_budget=16)
    assert third.rid.tolist() == [4, 2, 9]  # verify rows, then finished prefills
    assert (third.num_prefill_tokens, third.pending_prefill_tokens) == (13, 0)
    assert third.num_real_tokens == third.num_padded_tokens == 14
    assert third.sum_context == 31 + 10 + 5


def test_no_prefill_budget_leaves_prompts_waiting(engine: TorchEngine) -> None:
    lane = Lane(engine)
    result = lane.step([admission(0, prompt(9))], prefill_budget=0)
    assert (result.num_real_tokens, result.pending_prefill_tokens) == (0, 9)
    assert lane.step(rids=[]).rid.tolist() == [0]


def test_verify_rows_come_before_prefill_in_the_step_limit(folder: Path, reference: Any) -> None:
    del reference
    lane = Lane(make_engine(folder, max_step_tokens=10))
    lane.step([admission(0, prompt(4))])
    result = lane.step([admission(1, prompt(30))], drafter=lambda rid, ids: [1, 2, 3])
    assert result.num_real_tokens == 10
    assert result.num_prefill_tokens == 6


# --- commits ---------------------------------------------------------------------------------


def test_commits_cover_every_position_once(
    engine: TorchEngine, texts: dict[int, tuple[list[int], list[int]]]
) -> None:
    lane = Lane(engine)
    pending = [admission(rid, ids, NUM_NEW) for rid, (ids, _) in texts.items()]
    lane.step(pending, prefill_budget=13)
    while len(lane.finish) < len(texts):
        lane.step(drafter=garbage, prefill_budget=13)
    for rid, (ids, text) in texts.items():
        rows = [c for o in lane.outcomes for c in o.committed if c.rid == rid]
        known = ids[:1]
        for item in rows:
            assert item.first_position == len(known) - 1
            known += item.ids
            assert item.digest == digest.of(known)
            assert item.features is None
            assert item.prefill_done == (len(known) > len(ids))
            assert item.finished == (item is rows[-1])
        assert known == ids + text


def test_results_are_frames(engine: TorchEngine) -> None:
    lane = Lane(engine)
    result = lane.step([admission(0, prompt(9)), admission(1, [])])
    assert decode(encode(result)) == result
    assert result.step_s > 0
    assert len(result.failures) == 1


# --- ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(6))
def test_stop_id_inside_an_accepted_block(
    place: int, engine: TorchEngine, texts: dict[int, tuple[list[int], list[int]]]
) -> None:
    """Nothing behind the stop is emitted or committed, though the whole block was right."""
    ids, text = next(
        (ids, text) for ids, text in texts.values() if len(set(text[: place + 2])) == place + 2
    )
    stop = np.array([text[place + 1]], np.int32)
    lane = Lane(engine)
    lane.step([admission(0, ids, NUM_NEW, stop_ids=stop)])
    result = lane.step(drafter=lambda rid, known: text[1:6])
    assert result.token_ids.tolist() == text[1 : place + 2]
    assert result.finish.tolist() == [FINISH_STOP]
    assert result.num_accepted.tolist() == [min(place + 1, 5)]
    (rows,) = lane.outcomes[-1].committed
    assert rows.finished
    assert list(rows.ids) == text[1 : place + 2]
    assert result.free_kv_blocks == engine.limits.kv_blocks


def test_first_token_can_be_the_last(
    engine: TorchEngine, texts: dict[int, tuple[list[int], list[int]]]
) -> None:
    ids, text = texts[3]
    stop = np.array(text[:1], np.int32)
    lane = Lane(engine)
    result = lane.step(
        [admission(0, ids, 1), admission(1, ids, 9, stop_ids=stop), admission(2, ids, 9)]
    )
    assert result.finish.tolist() == [FINISH_LENGTH, FINISH_STOP, 0]
    assert result.token_ids.tolist() == text[:1] * 3


def test_drafts_past_the_last_token_are_not_computed(
    engine: TorchEngine, texts: dict[int, tuple[list[int], list[int]]]
) -> None:
    ids, text = texts[1]
    lane = Lane(engine)
    lane.step([admission(0, ids, 4)])
    result = lane.step(drafter=lambda rid, known: text[1:8])
    assert result.num_real_tokens == 3
    assert result.token_ids.tolist() == text[1:4]
    assert result.num_accepted.tolist() == [2]
    assert result.finish.tolist() == [FINISH_LENGTH]


def test_to_exactly_max_model_len_with_gamma_pending(folder: Path, reference: Any) -> None:
    """The last positions of the model are used, drafts that would pass them are refused."""
    lane = Lane(make_engine(folder, max_model_len=50, kv_tokens=64, kv_block_tokens=16))
    ids = prompt(30)
    text = reference_greedy(reference, ids, 20)
    lane.step([admission(0, ids, 1000)])
    while 0 not in lane.finish:
        room = 50 - len(lane.ids[0])
        result = lane.step(drafter=lambda rid, known, room=room: [7] * room + [7])
        assert [failure.code for failure in result.failures] == ["FrameError"]
        lane.failures.clear()
        lane.step(drafter=lambda rid, known, room=room: ([7] * room)[:6])
    assert lane.emitted(0, 30) == text
    assert lane.finish[0] == FINISH_LENGTH
    assert lane.step().free_kv_blocks == 4


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"constraint_kind": "json_object"}, Unsupported),
        ({"constraint_kind": "choice", "constraint": "[]"}, BadConstraint),
        ({"adapter": "sql"}, Unsupported),
    ],
)
def test_what_it_does_not_offer_is_refused(
    changes: dict[str, Any], error: type[DSparkError], engine: TorchEngine
) -> None:
    """What no engine may take is refused in `tests.verifier_service.conformance`."""
    bad = dataclasses.replace(admission(0, [1, 2, 3, 4, 5]), **changes)
    with pytest.raises(error):
        engine.check(bad)
    lane = Lane(engine)
    result = lane.step([bad, admission(1, prompt(5))])
    assert [(f.rid, f.code) for f in result.failures] == [(0, error.__name__)]
    assert result.rid.tolist() == [1]


def test_a_request_that_never_fits_is_refused_for_good(folder: Path, reference: Any) -> None:
    del reference
    engine = make_engine(folder, kv_tokens=64, kv_block_tokens=16)
    engine.check(admission(0, prompt(5), 60))  # the last of 65 tokens needs no KV
    with pytest.raises(PromptTooLong, match="5 KV blocks of 4"):
        engine.check(admission(0, prompt(5), 61))


def test_admission_past_kv_or_requests_is_overload(folder: Path, reference: Any) -> None:
    del reference
    lane = Lane(make_engine(folder, kv_tokens=64, kv_block_tokens=16, max_requests=2))
    result = lane.step([admission(0, prompt(5), 30), admission(1, prompt(5), 30)])
    assert result.free_kv_blocks == 1  # 34 positions are 3 blocks of 16: only the first fits
    assert lane.failures == {1: "Overloaded"}
    lane = Lane(make_engine(folder, kv_tokens=64, kv_block_tokens=16, max_requests=2))
    lane.step([admission(rid, prompt(5), 5) for rid in range(3)])
    assert lane.failures == {2: "Overloaded"}
    lane.step([admission(3, prompt(5), 5)], rids=[], releases=np.array([0], np.int64))
    assert 3 in lane.decoding


def test_the_same_rid_twice_is_refused(engine: TorchEngine) -> None:
    lane = Lane(engine)
    lane.step([admission(0, prompt(5))])
    known = list(lane.ids[0])
    result = lane.step([admission(0, prompt(6))], rids=[])
    assert [failure.code for failure in result.failures] == ["FrameError"]
    assert engine.step(make_step([Row(rid=0, ids=known)])).result.rid.tolist() == [0]


def test_bad_rows_change_nothing_and_harm_nobody(
    engine: TorchEngine, texts: dict[int, tuple[list[int], list[int]]]
) -> None:
    lane = Lane(engine)
    lane.step([admission(rid, texts[rid][0], NUM_NEW) for rid in (1, 2, 3)])
    lane.step([admission(9, prompt(40))], rids=[], prefill_budget=8)
    known = {rid: tuple(ids) for rid, ids in lane.ids.items()}
    good = texts[1][1][1:4]
    cases = [
        (Row(rid=77, ids=known[2]), "StaleFrame"),
        (Row(rid=9, ids=known[9]), "StaleFrame"),
        (Row(rid=2, ids=known[2][:-1]), "StaleFrame"),
        (Row(rid=2, ids=(*known[2][:-1], known[2][-1] ^ 1)), "StaleFrame"),
        (Row(rid=2, ids=known[2], draft_ids=[1, VOCAB_SIZE]), "FrameError"),
        (Row(rid=2, ids=known[2], draft_ids=[-1]), "FrameError"),
    ]
    step = make_step(
        [
            Row(rid=1, ids=known[1], draft_ids=good),
            *(row for row, _ in cases),
            Row(rid=3, ids=known[3]),
            Row(rid=3, ids=known[3]),
        ],
        prefill_budget=0,
    )
    result = engine.step(step).result
    assert [failure.code for failure in result.failures] == [c for _, c in cases] + ["FrameError"]
    assert result.rid.tolist() == [1, 3]
    assert result.token_ids.tolist() == [*texts[1][1][1:5], texts[3][1][1]]
    after = engine.step(make_step([Row(rid=2, ids=known[2])], prefill_budget=0)).result
    assert after.token_ids.tolist() == [texts[2][1][1]]


def test_a_bad_q_is_one_rows_failure(engine: TorchEngine) -> None:
    sampling = make_sampling(temperature=1.0, mode="rejection", seed=3)
    lane = Lane(engine)
    lane.step([admission(rid, prompt(8), 16, sampling=sampling) for rid in range(3)])
    rows = [Row(rid=rid, ids=lane.ids[rid], draft_ids=[5, 6]) for rid in range(3)]
    q_ids = np.array([[5, 9], [6, 9], [5, 9], [8, 9]], np.int32)  # row 2: no mass on its id 6
    step = make_step(
        rows,
        has_q=np.array([1, 0, 1], np.uint8),
        q_ids=q_ids,
        q_probs=np.full((4, 2), 0.5, np.float32),
    )
    result = engine.step(step).result
    assert result.rid.tolist() == [0, 1]
    assert [(f.rid, f.code) for f in result.failures] == [(2, "FrameError")]


def test_q_is_cut_with_the_drafts(engine: TorchEngine) -> None:
    sampling = make_sampling(temperature=1.0, mode="rejection", seed=3)
    lane = Lane(engine)
    lane.step([admission(0, prompt(8), 3, sampling=sampling)])
    step = make_step(
        [Row(rid=0, ids=lane.ids[0], draft_ids=[5, 6, 7])],
        has_q=np.array([1], np.uint8),
        q_ids=np.array([[5, 9], [6, 9], [7, 9]], np.int32),
        q_probs=np.full((3, 2), 0.5, np.float32),
    )
    result = engine.step(step).result
    assert result.num_real_tokens == 2
    assert not result.failures


def test_rows_past_the_step_limit_wait(folder: Path, reference: Any) -> None:
    del reference
    lane = Lane(make_engine(folder, max_step_tokens=8))
    for rid in range(3):
        lane.step([admission(rid, prompt(5, rid))], rids=[])
    result = lane.step(drafter=lambda rid, ids: [1, 2, 3, 4])
    assert result.rid.tolist() == [0]
    assert [(f.rid, f.code) for f in result.failures] == [(1, "Overloaded"), (2, "Overloaded")]
    assert lane.step(rids=[1]).rid.tolist() == [1]


def test_releasing_the_unknown_is_nothing(engine: TorchEngine) -> None:
    lane = Lane(engine)
    lane.step([admission(0, prompt(5))])
    result = lane.step(rids=[], releases=np.array([5, 0, 0], np.int64))
    assert not result.failures
    assert result.free_kv_blocks == engine.limits.kv_blocks


def test_numbers_that_are_not_finite_end_one_request(
    engine: TorchEngine, texts: dict[int, tuple[list[int], list[int]]]
) -> None:
    """Its neighbours go on, and nothing of it is left in the blocks that it gives back."""
    lane = Lane(engine)
    lane.step([admission(rid, texts[rid][0], NUM_NEW) for rid in (1, 2, 3)])
    slot = engine._requests[2].reservation.start + 3
    engine._cache.values[1][:, slot] = math.nan
    while len(lane.finish) + len(lane.failures) < 3:
        lane.step(drafter=garbage, rids=sorted(lane.decoding - set(lane.failures)))
    assert lane.failures == {2: "DSparkError"}
    for rid in (1, 3):
        assert lane.emitted(rid, len(texts[rid][0])) == texts[rid][1]
    assert all(bool(t.isfinite().all()) for t in (*engine._cache.keys, *engine._cache.values))
    assert lane.step(rids=[]).free_kv_blocks == engine.limits.kv_blocks


# --- long runs and profiling -------------------------------------------------------------------


def test_a_thousand_random_rounds_leak_nothing(folder: Path, reference: Any) -> None:
    """Admissions, drafts, releases, overload, tight KV (so that blocks scatter), then emptiness."""
    del reference
    engine = make_engine(folder, kv_tokens=160, kv_block_tokens=4, max_model_len=48, max_requests=6)
    rng = np.random.default_rng(0)
    lane, rid, scattered = Lane(engine), 0, 0
    for _ in range(1000):
        arriving = []
        for _ in range(rng.integers(0, 3)):
            num_prompt = int(rng.integers(1, 40))
            new = int(rng.integers(1, 20))
            arriving.append(admission(rid, prompt(num_prompt, rid), new))
            rid += 1
        leaving = [r for r in lane.decoding if rng.random() < 0.05]
        lane.decoding -= set(leaving)
        for r in leaving:
            lane.finish[r] = -1

        def drafter(r: int, ids: Sequence[int]) -> list[int]:
            room = engine.limits.max_model_len - len(ids)
            return garbage(r, ids)[:room]

        lane.step(
            arriving,
            drafter=drafter,
            rids=[r for r in sorted(lane.decoding) if rng.random() < 0.9],
            releases=np.array(leaving, np.int64),
            prefill_budget=int(rng.integers(0, 30)),
        )
        scattered += any(
            not request.reservation.is_contiguous for request in engine._requests.values()
        )
    assert rid > 500
    assert len(lane.finish) > 100
    assert scattered > 10
    assert set(lane.failures.values()) == {"Overloaded"}
    while engine._requests:
        lane.step(prefill_budget=100)
    assert engine.step(make_step()).result.free_kv_blocks == engine.limits.kv_blocks


def test_scattered_requests_say_the_same(folder: Path, reference: Any) -> None:
    engine = make_engine(folder, kv_tokens=160, kv_block_tokens=4)
    lane = Lane(engine)
    lane.step([admission(rid, prompt(9, rid), 8) for rid in range(10)])  # 4 blocks each: all 40
    lane.step(rids=[], releases=np.array([1, 3, 5, 7], np.int64))
    lane.decoding -= {1, 3, 5, 7}
    ids = prompt(20, 99)
    lane.step([admission(50, ids, 20)], rids=[])
    assert not engine._requests[50].reservation.is_contiguous
    while 50 not in lane.finish:
        lane.step(drafter=garbage)
    assert lane.emitted(50, 20) == reference_greedy(reference, ids, 20)
    assert lane.emitted(8, 9) == reference_greedy(reference, prompt(9, 8), 8)


def shape(num_tokens: int, context: int, **changes: int) -> StepShape:
    return StepShape(num_tokens=num_tokens, context=context, **changes)


def test_measuring_leaves_no_state(engine: TorchEngine, folder: Path) -> None:
    shapes = [shape(1, 0), shape(9, 40), shape(128, 128), shape(3, 509), shape(5, 9, row_tokens=1)]
    for one in (*shapes, shape(0, 17, num_prefill=40), shape(9, 0, num_prefill=3)):
        assert engine.measure_step(one) > 0
    assert engine.step(make_step()).result.free_kv_blocks == engine.limits.kv_blocks
    small = make_engine(folder, kv_tokens=64)
    assert small.measure_step(shape(64, 40)) > 0  # more rows than blocks: they share
    for num_tokens, context in ((0, 4), (129, 4), (1, 512), (1, 100)):
        with pytest.raises(InvalidRequest):
            small.measure_step(shape(num_tokens, context))
    with pytest.raises(InvalidRequest, match="KV"):
        small.measure_step(shape(16, 8, num_prefill=60))
    assert small.step(make_step()).result.free_kv_blocks == small.limits.kv_blocks


@pytest.mark.parametrize("kv_tokens", [16, 64, 4096])
def test_a_profile_of_whatever_the_kv_holds(folder: Path, kv_tokens: int) -> None:
    small = make_engine(folder, kv_tokens=kv_tokens, max_requests=1)
    profile = measure_profile(small, budget_s=0.2)
    assert profile.num_tokens[0] == 1
    assert profile.num_tokens[-1] == small.limits.max_step_tokens
    assert min(profile.step_s) > 0
    assert profile.fingerprint.startswith(f"{small.limits.model_fingerprint}/torch ")
    assert small.step(make_step()).result.free_kv_blocks == small.limits.kv_blocks


def test_a_measured_step_counts_as_a_real_one_does(engine: TorchEngine) -> None:
    engine.step(make_step(admissions=(admission(1, prompt(12), 4),), prefill_budget=9))
    first = engine.step(make_step(prefill_budget=9)).result
    chunk = shape(0, 9, num_prefill=3)
    assert first.num_prefill_tokens == 3
    assert (first.sum_context, first.num_pairs) == (chunk.sum_context, chunk.num_pairs)
    assert first.num_pairs == 10 + 11 + 12
    engine.release_all()
