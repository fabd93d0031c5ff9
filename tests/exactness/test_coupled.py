"""Coupled mode, enumerated: exact under any schedule, the retrospective and worse included."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.noise import Stream
from drafter_service.sampling import Block
from router.policies.causal import causal_lengths
from tests.exactness.cells import product, race_cells
from tests.exactness.test_rejection import (
    APPENDIX_SPS,
    appendix_pair,
    markov_pair,
    three_token_pair,
)
from tests.exactness.tiny import (
    Injected,
    Pair,
    Schedule,
    gap,
    retrospective,
    sampling,
    step_of,
    survival,
)

SPS = np.array([1, 1, 0.8, 0.72, 0.55, 0.5, 0.5])


def each(rule: Schedule) -> Schedule:
    """Apply a rule to every request by itself: each is alone in its step."""

    def apply(survival_RG: np.ndarray, block: Block) -> np.ndarray:
        return np.concatenate([rule(survival_RG[r : r + 1], block) for r in range(len(block.ids))])

    return apply


SCHEDULES: dict[str, Schedule] = {
    "none": lambda survival_RG, block: np.zeros(len(block.ids), np.int64),
    "full": lambda survival_RG, block: np.full(len(block.ids), block.ids.shape[1]),
    "causal": each(lambda s, block: causal_lengths(step_of(s, SPS))),
    "retrospective": each(lambda s, block: retrospective(s, APPENDIX_SPS)),
    "peeking": lambda survival_RG, block: block.ids.sum(axis=1) % (block.ids.shape[1] + 1),
}


def noise_cells(pair: Pair, num_positions: int, *, ends: bool) -> tuple[np.ndarray, np.ndarray]:
    """Uniforms [n, positions, V] and weights: noise of each position cut by every law it meets."""
    return product([race_cells(np.concatenate([pair.p, pair.q]), ends=ends)] * num_positions)


def emit(pair: Pair, uniforms: np.ndarray, schedule: Schedule, length: int) -> list:
    """Rounds of draft, schedule, accept from anchor A until all have ``length`` tokens.

    Noise past the tokens looked at is arbitrary: it may move schedules, not these tokens.
    """
    num = len(uniforms)
    table = np.random.default_rng(5).random((num, length + 2 * pair.gamma + 3, pair.vocab_size))
    table[:, 1 : length + 1] = uniforms
    randomness = Injected({Stream.GUMBEL: table, Stream.REST: np.full((num, 99, 1), 0.5)})
    contexts: list[tuple[int, ...]] = [(0,)] * num
    while active := [n for n in range(num) if len(contexts[n]) <= length]:
        settings = [sampling(seed=n) for n in active]
        ids = [contexts[n] for n in active]
        block = pair.draft(ids, settings, Stripped(randomness))
        lengths = schedule(survival(block), block)
        verdicts = pair.verify(ids, settings, block, lengths, randomness)
        for n, verdict in zip(active, verdicts, strict=True):
            contexts[n] += verdict.token_ids
    return [ids[1 : length + 1] for ids in contexts]


class Stripped:
    """A drafter in coupled mode may ask for Gumbel noise only (and for no DRAFT numbers)."""

    def __init__(self, inner: Injected) -> None:
        self.inner = inner

    def uniform(self, stream: Stream, seeds: np.ndarray, positions: object, indices: object):  # type: ignore[no-untyped-def]
        if stream is Stream.DRAFT:
            assert seeds.size == 0
            return np.empty(np.broadcast_shapes(seeds.shape, np.shape(indices)))
        assert stream is Stream.GUMBEL
        return self.inner.uniform(stream, seeds, positions, indices)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("make", "length"), [(appendix_pair, 3), (markov_pair, 3), (three_token_pair, 1)]
)
def test_any_schedule_is_exact(make: object, length: int, schedule: str) -> None:
    pair: Pair = make()  # type: ignore[operator]
    uniforms, weights = noise_cells(pair, length, ends=True)
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    law: dict[tuple[int, ...], float] = {}
    for ids, weight in zip(emit(pair, uniforms, SCHEDULES[schedule], length), weights, strict=True):
        law[ids] = law.get(ids, 0.0) + weight
    assert gap(law, pair.sequence_law(0, length)) < 1e-12


def test_three_tokens_two_positions() -> None:
    """Three tokens, whole rounds; the noise of position 1 meets the laws after the anchor only."""
    pair = three_token_pair()
    first = race_cells(np.stack([pair.p[0], pair.q[0]]), ends=False)
    uniforms, weights = product([first, race_cells(np.concatenate([pair.p, pair.q]), ends=False)])
    for schedule in ("full", "peeking"):
        law: dict[tuple[int, ...], float] = {}
        for ids, weight in zip(emit(pair, uniforms, SCHEDULES[schedule], 2), weights, strict=True):
            law[ids] = law.get(ids, 0.0) + weight
        assert gap(law, pair.sequence_law(0, 2)) < 1e-12


def test_two_requests_are_independent() -> None:
    """Both blocks in one step, scheduled together by the retrospective rule: the product law."""
    pair, length = markov_pair(), 2
    uniforms, weights = noise_cells(pair, length, ends=False)
    num = len(weights)
    left, right = (index.ravel() for index in np.indices((num, num)))

    def together(survival_RG: np.ndarray, block: Block) -> np.ndarray:
        if len(block.ids) != 2 * num * num:  # later rounds, when some pairs are half done
            return np.full(len(block.ids), 1)
        lengths = [retrospective(survival_RG[[n, num * num + n]], SPS) for n in range(num * num)]
        return np.array(lengths).T.ravel()

    both = np.concatenate([uniforms[left], uniforms[right]])
    out = emit(pair, both, together, length)
    law: dict[tuple[int, ...], float] = {}
    for n in range(num * num):
        key = out[n] + out[num * num + n]
        law[key] = law.get(key, 0.0) + weights[left[n]] * weights[right[n]]
    single = pair.sequence_law(0, length)
    wanted = {a + b: v * w for a, v in single.items() for b, w in single.items()}
    assert gap(law, wanted) < 1e-12


def test_matching_probability() -> None:
    """A first draft survives with probability sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)."""
    pair = three_token_pair()
    p, q = pair.p[0], pair.q[0]
    uniforms, weights = race_cells(np.stack([p, q]), ends=True)
    table = np.full((len(weights), 4, 3), 0.5)
    table[:, 1] = uniforms
    randomness = Injected({Stream.GUMBEL: table, Stream.REST: np.full((len(weights), 4, 1), 0.5)})
    settings = [sampling(seed=n) for n in range(len(weights))]
    contexts = [(0,)] * len(weights)
    block = pair.draft(contexts, settings, Stripped(randomness))
    verdicts = pair.verify(contexts, settings, block, np.ones(len(weights), np.int64), randomness)
    matched = sum(w for w, verdict in zip(weights, verdicts, strict=True) if verdict.num_accepted)
    wanted = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(3))
    assert matched == pytest.approx(wanted, abs=1e-12)
