"""A prompt whose beginning is known says the same as one that is computed, for less."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.config import ModelConfig, VerifierConfig
from cluster.drafter_checkpoint import Projection
from cluster.model_store import ensure_drafter
from cluster.wire import Admission, Step
from deploy.offline.opening import open_drafting
from deploy.offline.rounds import LocalPair, Prompt
from deploy.text_model import load_text_model
from dspark.demo.prompts import PROMPTS
from tests.frames import make_sampling, make_step
from tests.verifier_service.torch_targets import (
    VOCAB_SIZE,
    Lane,
    admission,
    make_engine,
    prompt,
    save_llama,
)
from verifier_service.engine import CommittedRows, StepOutcome, StepShape
from verifier_service.projection import FeatureProjection
from verifier_service.torch_engine import TorchEngine
from verifier_service.torch_engine.loading import engine_limits, load_target

SIZE = 16
WIDTH = 24
ROW_BYTES = WIDTH * 4
BLOCK_BYTES = SIZE * ROW_BYTES
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_llama(folder)
    return folder


def projected(folder: Path, *, limits: dict[str, Any] | None = None, **changes: Any) -> TorchEngine:
    """An engine with a projection of random weights, and a prefix cache unless told otherwise."""
    model = load_target(folder, device=CPU)
    verifier = VerifierConfig(
        **{"kv_tokens": 1024, "kv_block_tokens": SIZE, "max_step_tokens": 128} | (limits or {})
    )
    taps, hidden = (0, 2, 3), model.spec.hidden_size
    projection = FeatureProjection(
        Projection(
            fc=torch.randn(WIDTH, len(taps) * hidden, generator=torch.Generator().manual_seed(1)),
            hidden_norm=torch.ones(WIDTH),
            rms_norm_eps=1e-6,
            target_layer_ids=taps,
            hidden_size=WIDTH,
            feature_width=len(taps) * hidden,
        ),
        device=CPU,
    )
    settings = {"prefix_cache": True, "prefix_rows_bytes": 1 << 20} | changes
    return TorchEngine(
        model, engine_limits(model, folder, ModelConfig(), verifier), projection, **settings
    )


@pytest.fixture
def engine(folder: Path) -> TorchEngine:
    return projected(folder)


@pytest.fixture(scope="module")
def cold(folder: Path) -> TorchEngine:
    """One that never finds anything."""
    return projected(folder, prefix_cache=False)


def garbage(rid: int, ids: Sequence[int]) -> list[int]:
    """Random drafts of every length up to 7."""
    rng = np.random.default_rng(1000 * rid + len(ids))
    return rng.integers(0, VOCAB_SIZE, rng.integers(0, 8)).tolist()


def ask(engine: TorchEngine, ids: Sequence[int], num_new: int = 30, **changes: Any) -> Lane:
    """One request, to its end; its drafts are garbage."""
    lane = Lane(engine)
    lane.run([admission(0, ids, num_new, **changes)], garbage)
    return lane


def num_cached(lane: Lane) -> int:
    return sum(outcome.result.num_cached_tokens for outcome in lane.outcomes)


def num_computed(lane: Lane) -> int:
    return sum(outcome.result.num_prefill_tokens for outcome in lane.outcomes)


def commits(lane: Lane, rid: int = 0) -> Iterator[CommittedRows]:
    return (rows for o in lane.outcomes for rows in o.committed if rows.rid == rid)


def features(lane: Lane, rid: int = 0) -> torch.Tensor:
    """Rows of all positions [T, D]; fails where they do not follow one another."""
    parts = []
    for rows in commits(lane, rid):
        assert rows.features is not None
        assert rows.first_position == sum(map(len, parts))
        assert rows.features.shape == (len(rows.ids), WIDTH)
        parts.append(rows.features)
    return torch.cat(parts)


# --- what is found -------------------------------------------------------------------------------


def second_turn(lane: Lane) -> list[int]:
    """What a client sends next: the prompt, the answer and a new prompt."""
    return [*lane.ids[0], *prompt(10, seed=77)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_prompt", [40, 5])
def test_a_second_turn_begins_behind_the_first(
    num_prompt: int, temperature: float, engine: TorchEngine, cold: TorchEngine
) -> None:
    """Prompt and answer are found; text and features are those of an engine that computes."""
    sampling = make_sampling(temperature=temperature, seed=5)
    first = ask(engine, prompt(num_prompt), sampling=sampling)
    ids = second_turn(first)
    # The last token of the first turn has no keys: it was never computed.
    known = (num_prompt + 29) // SIZE * SIZE
    warm, anew = ask(engine, ids, sampling=sampling), ask(cold, ids, sampling=sampling)
    assert warm.ids == anew.ids
    assert (num_cached(warm), num_computed(warm)) == (known, len(ids) - known)
    assert (num_cached(anew), num_computed(anew)) == (0, len(ids))
    assert warm.outcomes[0].result.sum_context == len(ids)
    torch.testing.assert_close(features(warm), features(anew), rtol=1e-4, atol=1e-5)
    assert [rows.digest for rows in commits(warm)][-1] == [r.digest for r in commits(anew)][-1]
    assert warm.accepted == anew.accepted


def test_the_first_commit_brings_the_rows_that_were_found(
    engine: TorchEngine, cold: TorchEngine
) -> None:
    """Also when the rest of the prompt comes in chunks."""
    ids = second_turn(ask(engine, prompt(40)))
    warm, anew = Lane(engine), Lane(cold)
    for lane in (warm, anew):
        lane.step([admission(0, ids)], prefill_budget=5)
        while 0 not in lane.finish:
            lane.step(prefill_budget=5)
    first, second, *_ = commits(warm)
    assert (first.first_position, len(first.ids)) == (0, 64 + 5)
    assert not first.prefill_done
    assert second.first_position == 69
    assert [o.result.num_cached_tokens for o in warm.outcomes[:2]] == [64, 0]
    assert warm.ids == anew.ids
    torch.testing.assert_close(features(warm), features(anew), rtol=1e-4, atol=1e-5)


def test_the_last_token_is_always_computed(engine: TorchEngine) -> None:
    ids = prompt(2 * SIZE)
    first = ask(engine, ids)
    again = ask(engine, ids)
    assert again.ids == first.ids
    assert (num_cached(again), num_computed(again)) == (SIZE, SIZE)
    longer = ask(engine, [*ids, 3])
    assert (num_cached(longer), num_computed(longer)) == (2 * SIZE, 1)


def test_blocks_of_a_live_request_are_found(engine: TorchEngine, cold: TorchEngine) -> None:
    lane, shared = Lane(engine), prompt(40)
    lane.step([admission(0, [*shared, 7], 40)], drafter=garbage)
    lane.step(drafter=garbage)
    result = lane.step([admission(1, [*shared, 8], 40)], drafter=garbage)
    assert result.num_cached_tokens == 32
    while len(lane.finish) < 2:
        lane.step(drafter=garbage)
    for rid, last in ((0, 7), (1, 8)):
        assert lane.ids[rid] == ask(cold, [*shared, last], 40).ids[0]


def test_a_request_continued_after_a_fault_finds_what_it_had(
    engine: TorchEngine, cold: TorchEngine
) -> None:
    ids = prompt(20)
    whole = ask(cold, ids, 40).ids[0]
    lane = Lane(engine)
    lane.step([admission(0, ids, 40)])
    while len(lane.ids[0]) < 50:
        lane.step()
    engine.release_all()
    known = lane.ids[0][:50]
    again = Lane(engine)
    again.run([dataclasses.replace(admission(1, known, 40), num_prompt=20)])
    assert again.ids[1] == whole
    assert num_cached(again) == 48


def test_two_that_share_a_beginning_in_one_step(engine: TorchEngine, cold: TorchEngine) -> None:
    """Computed together nothing is there to be found; in turn, it is by the time it is needed."""
    shared = prompt(3 * SIZE)
    pair = [admission(rid, [*shared, rid], 20) for rid in (0, 1)]
    together = Lane(engine)
    together.run(pair)
    assert num_cached(together) == 0
    expected = {rid: ask(cold, [*shared, rid], 20).ids[0] for rid in (0, 1)}
    assert together.ids == expected
    other = prompt(3 * SIZE, seed=9)
    lane = Lane(engine)
    first = lane.step([admission(r, [*other, r], 20) for r in (0, 1)], prefill_budget=40)
    assert (first.num_cached_tokens, first.pending_prefill_tokens) == (0, 9 + 49)
    second = lane.step(prefill_budget=40)
    # Of the 48 that they share, 40 are computed when the other one's turn comes.
    assert second.num_cached_tokens == 2 * SIZE
    assert (second.num_prefill_tokens, second.pending_prefill_tokens) == (9 + 17, 0)
    while len(lane.finish) < 2:
        lane.step()
    for rid in (0, 1):
        assert lane.ids[rid] == ask(cold, [*other, rid], 20).ids[0]


def test_what_is_pending_is_what_will_be_computed(engine: TorchEngine) -> None:
    ids = second_turn(ask(engine, prompt(40)))
    lane = Lane(engine)
    waiting = lane.step([admission(0, ids)], prefill_budget=0)
    assert (waiting.pending_prefill_tokens, waiting.num_cached_tokens) == (len(ids) - 64, 0)
    result = lane.step(prefill_budget=10)
    assert (result.num_prefill_tokens, result.num_cached_tokens) == (10, 64)
    assert result.pending_prefill_tokens == len(ids) - 74


# --- what is not found ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [0, 1, 3])
def test_a_hit_ends_where_rows_are_missing(
    num_blocks: int, folder: Path, cold: TorchEngine
) -> None:
    engine = projected(folder, prefix_rows_bytes=num_blocks * BLOCK_BYTES)
    ids = second_turn(ask(engine, prompt(40)))
    warm, anew = ask(engine, ids), ask(cold, ids)
    assert num_cached(warm) == num_blocks * SIZE
    assert warm.ids == anew.ids
    torch.testing.assert_close(features(warm), features(anew), rtol=1e-4, atol=1e-5)


def test_without_a_projection_no_rows_are_needed(folder: Path) -> None:
    engine = make_engine(folder, prefix_rows_bytes=0)
    ids = second_turn(ask(engine, prompt(40)))
    warm = ask(engine, ids)
    assert num_cached(warm) == 64
    assert next(commits(warm)).features is None


def test_rows_that_go_while_a_request_waits(folder: Path, cold: TorchEngine) -> None:
    """Found at admission, gone at the first chunk: computed after all."""
    engine = projected(folder, prefix_rows_bytes=4 * BLOCK_BYTES)
    ids = second_turn(ask(engine, prompt(40)))
    lane = Lane(engine)
    other = admission(1, prompt(60, seed=3))
    result = lane.step([other, admission(0, ids)], prefill_budget=60)
    assert result.pending_prefill_tokens == len(ids) - 64
    result = lane.step(prefill_budget=128)
    assert result.num_cached_tokens == SIZE, "the three blocks of the other's prompt took room"
    assert result.num_prefill_tokens == len(ids) - SIZE
    while len(lane.finish) < 2:
        lane.step(drafter=garbage)
    anew = ask(cold, ids, 8)
    assert lane.ids[0] == anew.ids[0]
    torch.testing.assert_close(features(lane), features(anew), rtol=1e-4, atol=1e-5)


def test_turned_off_it_finds_nothing(folder: Path) -> None:
    engine = make_engine(folder, prefix_cache=False)
    ids = prompt(40)
    assert num_cached(ask(engine, ids)) == num_cached(ask(engine, ids)) == 0
    on = make_engine(folder)
    ask(on, ids)
    assert num_cached(ask(on, ids)) == 32


def test_an_adapter_has_prefixes_of_its_own(folder: Path) -> None:
    plain = projected(folder)
    engine = TorchEngine(
        plain._model,
        dataclasses.replace(plain.limits, adapters=("a", "b")),
        prefix_cache=True,
    )

    def cached(name: str) -> int:
        return num_cached(ask(engine, prompt(40), adapter=name))

    assert [cached(name) for name in ("", "a", "b", "", "a", "b")] == [0, 0, 0, 32, 32, 32]


def test_numbers_that_are_not_finite_are_found_no_more(folder: Path, cold: TorchEngine) -> None:
    """The request that found them ends; what it had found is computed anew for the next one."""
    engine = projected(folder)
    ids = second_turn(ask(engine, prompt(40)))
    block = engine._prefix.find(admission(0, ids), ids).blocks[1]
    engine._cache.values[1][:, block * SIZE + 3] = math.nan
    lane = Lane(engine)
    result = lane.step([admission(0, ids)])
    assert lane.failures == {0: "DSparkError"}
    assert result.free_kv_blocks == engine.limits.kv_blocks
    gauges = lane.outcomes[-1].gauges
    assert (gauges["prefix_blocks"], gauges["prefix_rows_bytes"]) == (0, 0)
    assert all(bool(t.isfinite().all()) for t in (*engine._cache.keys, *engine._cache.values))
    again = ask(engine, ids)
    assert num_cached(again) == 0
    assert again.ids == ask(cold, ids).ids


# --- memory --------------------------------------------------------------------------------------


def test_what_is_not_known_is_lent_before_what_is(folder: Path) -> None:
    """Eight blocks, and prompts that each fill whole ones: 3, 3 and 2."""
    engine = make_engine(folder, kv_tokens=8 * SIZE)
    num_blocks = {1: 3, 2: 3, 3: 2}

    def cached(seed: int) -> int:
        return num_cached(ask(engine, prompt(num_blocks[seed] * SIZE, seed), 1)) // SIZE

    assert [cached(1), cached(2), cached(3)] == [0, 0, 0]
    assert cached(2) == 2, "its copy takes the place of the first, the least recently used"
    assert cached(3) == 1, "its copy takes the place where the second had been"
    assert cached(1) == 0
    assert cached(2) == 2, "what the first took again was where the others had been"


def test_a_request_is_as_old_as_its_end(folder: Path) -> None:
    """And of what must go, its tail goes before its head."""
    engine = make_engine(folder, kv_tokens=8 * SIZE)
    lane, long, short = Lane(engine), prompt(4 * SIZE, 1), prompt(3 * SIZE, 2)
    lane.step([admission(0, long, 2)])
    ask(engine, short, 1)  # begins later and ends sooner
    lane.step()
    assert 0 in lane.finish

    def num_found(ids: Sequence[int]) -> int:
        return len(engine._prefix.find(admission(0, [*ids, 0]), [*ids, 0]).blocks)

    ask(engine, prompt(3 * SIZE, 3), 1)
    assert (num_found(short), num_found(long)) == (0, 4)
    ask(engine, prompt(2 * SIZE, 4), 1)
    assert num_found(long) == 2


def test_memory_that_is_lent_to_the_request_that_finds_it(folder: Path, cold: TorchEngine) -> None:
    """The run it gets overlaps the blocks it found, in other places."""
    engine = projected(folder, limits={"kv_tokens": 6 * SIZE})
    lane = Lane(engine)
    lane.step([admission(5, prompt(SIZE, 5), 16)])  # two blocks at the start
    lane.step([admission(0, prompt(50), 8)], rids=[])  # four behind them
    while 0 not in lane.finish:
        lane.step(rids=[0])
    lane.step(rids=[], releases=np.array([5], np.int64))
    ids = [*lane.ids[0], *prompt(20, 8)]
    warm = ask(engine, ids, 16)
    assert num_cached(warm) == 3 * SIZE
    assert warm.ids == ask(cold, ids, 16).ids


def test_many_chats_in_little_memory(folder: Path, cold: TorchEngine) -> None:
    """Turns of six chats that share a system prompt come and go; some find, some are found short,
    blocks scatter; every text is right."""
    engine = projected(
        folder,
        limits={"kv_tokens": 50 * 4, "kv_block_tokens": 4, "max_requests": 4},
        prefix_rows_bytes=36 * 4 * ROW_BYTES,
    )
    rng = np.random.default_rng(0)
    lane, rid, scattered = Lane(engine), 0, 0
    system = prompt(10, seed=50)
    chats = [list(system) for _ in range(6)]
    asked: dict[int, Admission] = {}
    busy: dict[int, int] = {}
    while len(asked) < 120 or busy:
        arriving = []
        idle = [chat for chat in range(6) if chat not in busy.values()]
        if len(asked) < 120 and idle and rng.random() < 0.6:
            chat = int(rng.choice(idle))
            if len(chats[chat]) > 70:
                chats[chat] = list(system)
            chats[chat] += rng.integers(0, VOCAB_SIZE, rng.integers(1, 9)).tolist()
            arriving = [admission(rid, chats[chat], int(rng.integers(1, 12)))]
            asked[rid], busy[rid] = arriving[0], chat
            rid += 1
        lane.step(
            arriving,
            drafter=garbage,
            rids=[r for r in sorted(lane.decoding) if rng.random() < 0.9],
            prefill_budget=int(rng.integers(0, 30)),
        )
        scattered += any(not r.reservation.is_contiguous for r in engine._requests.values())
        for done in [r for r in busy if r in lane.finish or r in lane.failures]:
            chat = busy.pop(done)
            if done in lane.finish:
                chats[chat] = list(lane.ids[done])
    assert set(lane.failures.values()) <= {"Overloaded"}
    assert len(lane.finish) > 50
    assert num_cached(lane) > num_computed(lane) / 4
    assert scattered > 10
    assert engine.step(make_step()).result.free_kv_blocks == 50
    for r in lane.finish:
        anew = ask(cold, asked[r].ids.tolist(), asked[r].max_new_tokens)
        assert lane.ids[r] == anew.ids[0]
        torch.testing.assert_close(features(lane, r), features(anew), rtol=1e-4, atol=1e-5)


def test_what_is_known_outlives_a_lease(engine: TorchEngine) -> None:
    ids = prompt(40)
    ask(engine, ids)
    engine.release_all()
    assert num_cached(ask(engine, ids)) == 32


def test_measuring_overwrites_nothing_that_is_found(folder: Path, cold: TorchEngine) -> None:
    engine = projected(folder, limits={"kv_tokens": 8 * SIZE})
    ids = prompt(40)
    ask(engine, ids)
    assert engine.measure_step(StepShape(num_tokens=8, context=40)) > 0  # fits beside it
    again = ask(engine, ids)
    assert num_cached(again) == 32
    assert engine.measure_step(StepShape(num_tokens=8, context=110)) > 0  # takes everything
    last = ask(engine, ids)
    assert num_cached(last) == 0
    assert last.ids == again.ids == ask(cold, ids).ids


# --- the embedded pair ---------------------------------------------------------------------------


@pytest.mark.model
def test_drafts_are_as_good_behind_a_prefix_that_was_found(smollm2_dir: Path) -> None:
    """Acceptance cold and warm: the same prompts twice, the second time found."""
    drafter = ensure_drafter("default", "smollm2-135m")
    assert isinstance(drafter, Path)
    engine = make_engine(smollm2_dir, drafter=drafter, kv_tokens=2048, max_step_tokens=256)
    lane = Lane(engine)  # hears what the engine says
    pair = LocalPair(
        _Listening(engine, lane),
        open_drafting(drafter, smollm2_dir, device="cpu", calibrated=True),
    )
    text_model = load_text_model(smollm2_dir)
    prompts = [
        Prompt(
            ids=text_model.encode_chat([{"role": "user", "content": one.text}]),
            source="demo",
            domain="",
        )
        for one in PROMPTS[:4]
    ]
    settings: dict[str, Any] = {"temperature": 0.0, "mode": "coupled", "seed": 0}
    settings |= {"max_new_tokens": 32, "concurrency": 4}
    cold = list(pair.run(prompts, **settings))
    assert num_cached(lane) < SIZE * len(prompts) * 2, "the chat template, at most"
    before = num_cached(lane)
    warm = list(pair.run(prompts, **settings))
    possible = sum((len(one.ids) - 1) // SIZE * SIZE for one in prompts)
    assert num_cached(lane) - before == possible
    accepted, again = (sum(one.num_accepted for one in rounds) for rounds in (cold, warm))
    assert accepted > len(cold) / 2
    assert abs(again - accepted) <= 2, "near-ties may move a draft or two"


class _Listening:
    """An engine whose outcomes a lane keeps."""

    def __init__(self, engine: TorchEngine, lane: Lane) -> None:
        self.limits, self.check = engine.limits, engine.check
        self.release_all, self.measure_step = engine.release_all, engine.measure_step
        self._engine, self._lane = engine, lane

    def step(self, step: Step) -> StepOutcome:
        self._lane.outcomes.append(self._engine.step(step))
        return self._lane.outcomes[-1]
