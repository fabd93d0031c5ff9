"""Rejection mode, enumerated: under the causal rule the joint output law is the target's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.special import logit

from cluster.noise import Stream
from drafter_service.sampling import Block
from router.policies.causal import causal_lengths
from tests.exactness.cells import intervals, partial_sums, product
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

APPENDIX_SPS = np.array([np.nan, 1.0, 0.5, 0.45])
"""Paper, Appendix A."""


def appendix_pair() -> Pair:
    """p = (0.7, 0.3), q = (0.5, 0.5); c_1 = 0.8; c_2 = 0.9 after A, 0 after B; anchor A."""
    return Pair(
        p=np.array([[0.7, 0.3]] * 2),
        q=np.full((2, 2), 0.5),
        a=np.array([logit(0.8) - logit(0.9), 0.0]),
        f=np.array([logit(0.9), -800.0]),
    )


def markov_pair() -> Pair:
    """Two tokens, laws that depend on the token before, confidences that spread the lengths."""
    return Pair(
        p=np.array([[0.61, 0.39], [0.17, 0.83]]),
        q=np.array([[0.75, 0.25], [0.375, 0.625]]),
        a=np.array([0.4, 0.9]),
        f=np.array([1.7, -0.6]),
    )


def three_token_pair() -> Pair:
    return Pair(
        p=np.array([[0.5, 0.31, 0.19], [0.07, 0.23, 0.7], [0.41, 0.02, 0.57]]),
        q=np.array([[0.25, 0.5, 0.25], [0.125, 0.25, 0.625], [0.625, 0.3125, 0.0625]]),
        a=np.array([0.4, 1.2]),
        f=np.array([1.5, -0.3, 0.4]),
    )


def draft_cells(pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    """Uniforms [n, G] of all draft outcomes, whatever the contexts, and weights [n]."""
    one = intervals((t for law in pair.q for t in partial_sums(law)), ends=True)
    return product([one] * pair.gamma)


def verify_cells(
    pair: Pair, anchor: int, drafts: list[int], *, ends: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Uniforms [n, len(drafts) + 1] of acceptance of each draft and of the last token."""
    previous = [anchor, *drafts]
    ratios = [pair.p[x, y] / pair.q[x, y] for x, y in itertools.pairwise(previous)]
    finals = [t for x in previous for t in partial_sums(pair.p[x])]
    for x in previous[:-1]:
        residual = np.maximum(pair.p[x] - pair.q[x], 0)
        finals += partial_sums(residual / residual.sum()) if residual.any() else []
    return product([*(intervals([r], ends=ends) for r in ratios), intervals(finals, ends=ends)])


def draft_all(pair: Pair, num_requests: int, anchor: int = 0) -> list[tuple[Block, float]]:
    """All joint draft outcomes of requests behind one id (at position 0), and their weights."""
    points, weights = product([draft_cells(pair)] * num_requests)
    num = len(weights) * num_requests
    table = np.zeros((num, 1, pair.gamma + 1))
    table[:, 0, 1:] = points.reshape(num, pair.gamma)
    samplings = [sampling(seed=s, mode="rejection") for s in range(num)]
    drafted = pair.draft([(anchor,)] * num, samplings, Injected({Stream.DRAFT: table}))
    outcomes: dict[bytes, tuple[Block, float]] = {}
    for n, weight in enumerate(weights):
        at = slice(n * num_requests, (n + 1) * num_requests)
        block = Block(
            ids=drafted.ids[at],
            confidence=drafted.confidence[at],
            q_ids=drafted.q_ids[at],
            q_probs=drafted.q_probs[at],
            has_q=drafted.has_q[at],
        )
        everything = (block.ids, block.confidence, block.q_ids, block.q_probs)
        key = b"".join(part.tobytes() for part in everything)
        outcomes[key] = (block, outcomes.get(key, (block, 0.0))[1] + weight)
    return list(outcomes.values())


def round_law(
    pair: Pair, schedule: Schedule, num_requests: int
) -> tuple[dict[tuple[tuple[int, ...], ...], float], set[tuple[int, ...]]]:
    """Joint law of what one round emits, and all schedules seen: draft, schedule, accept."""
    law: dict[tuple[tuple[int, ...], ...], float] = {}
    seen = set()
    for block, weight in draft_all(pair, num_requests):
        lengths = schedule(survival(block), block)
        seen.add(tuple(lengths.tolist()))
        cells = [
            verify_cells(pair, 0, block.ids[r, : lengths[r]].tolist(), ends=num_requests == 1)
            for r in range(num_requests)
        ]
        grid = list(itertools.product(*[range(len(weights)) for _, weights in cells]))
        # Seed n * R + r names request r in the n-th point of the grid: one accept call for all.
        num = len(grid) * num_requests
        accepts, finals = np.zeros((num, 1, pair.gamma + 2)), np.zeros((num, 1, pair.gamma + 2))
        for n, at in enumerate(grid):
            for r, j in enumerate(at):
                point = cells[r][0][j]
                accepts[n * num_requests + r, 0, 1 : len(point)] = point[:-1]
                finals[n * num_requests + r] = point[-1]
        randomness = Injected(
            {Stream.ACCEPT: accepts, Stream.RESIDUAL: finals, Stream.BONUS: finals}
        )
        repeated = Block(
            ids=np.tile(block.ids, (len(grid), 1)),
            confidence=np.tile(block.confidence, (len(grid), 1)),
            q_ids=np.tile(block.q_ids, (len(grid), 1, 1)),
            q_probs=np.tile(block.q_probs, (len(grid), 1, 1)),
            has_q=np.tile(block.has_q, len(grid)),
        )
        verdicts = pair.verify(
            [(0,)] * num,
            [sampling(seed=s, mode="rejection") for s in range(num)],
            repeated,
            np.tile(lengths, len(grid)),
            randomness,
        )
        for n, at in enumerate(grid):
            share = weight * np.prod([cells[r][1][j] for r, j in enumerate(at)])
            start = n * num_requests
            key = tuple(v.token_ids for v in verdicts[start : start + num_requests])
            law[key] = law.get(key, 0.0) + share
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    return law, seen


def one_request(pair: Pair, schedule: Schedule) -> tuple[dict[tuple[int, ...], float], set]:
    joint, seen = round_law(pair, schedule, 1)
    law = {key[0]: weight for key, weight in joint.items()}
    return pair.complete(law, pair.gamma + 1), seen


def causal(sps: np.ndarray) -> Schedule:
    return lambda survival_RG, block: causal_lengths(step_of(survival_RG, sps))


@pytest.mark.parametrize("make", [appendix_pair, markov_pair, three_token_pair])
@pytest.mark.parametrize(
    "sps",
    [
        APPENDIX_SPS,
        np.array([np.nan, 1.0, 0.66, 0.49]),  # the second draft pays after some first ones
        np.array([np.nan, 1.0, 1.0, 1.0]),
    ],
)
def test_causal_rule_is_exact(make: object, sps: np.ndarray) -> None:
    pair = make()  # type: ignore[operator]
    law, _ = one_request(pair, causal(sps))
    assert gap(law, pair.sequence_law(0, pair.gamma + 1)) < 1e-12


def test_causal_lengths_vary_with_drawn_tokens() -> None:
    """The enumeration above is no trivial one: length 1 or 2 depending on x_1."""
    _, seen = one_request(markov_pair(), causal(np.array([np.nan, 1.0, 0.66, 0.49])))
    assert seen == {(1,), (2,)}


@pytest.mark.parametrize("length", [0, 1, 2])
def test_fixed_length_is_exact(length: int) -> None:
    pair = three_token_pair()
    law, _ = one_request(pair, lambda survival_RG, block: np.array([length]))
    assert gap(law, pair.sequence_law(0, pair.gamma + 1)) < 1e-12


def test_appendix_a() -> None:
    """Ours gives the target's 0.7; the retrospective rule, which we must not use, gives 0.85."""
    pair = appendix_pair()

    def first_is_a(schedule: Schedule) -> float:
        law, _ = one_request(pair, schedule)
        return sum(weight for ids, weight in law.items() if ids[0] == 0)

    wrong = first_is_a(lambda survival_RG, block: retrospective(survival_RG, APPENDIX_SPS))
    assert first_is_a(causal(APPENDIX_SPS)) == pytest.approx(0.7, abs=1e-12)
    assert wrong == pytest.approx(0.85, abs=1e-12)


@pytest.mark.parametrize("sps", [[1, 1, 1, 0.75, 0.62, 0.52, 0.46], [1, 1, 1, 0.79, 0.7, 0.6, 0.5]])
def test_two_requests_are_independent(sps: list[float]) -> None:
    """One walk over both blocks; still the joint law is the product law."""
    pair = markov_pair()
    joint, seen = round_law(pair, causal(np.array(sps)), 2)
    assert len(seen) > 1, "the schedule never varied: nothing was tested"
    length = pair.gamma + 1
    law: dict[tuple[int, ...], float] = {}
    for (first, second), weight in joint.items():
        for left, share in pair.complete({first: weight}, length).items():
            for right, part in pair.complete({second: share}, length).items():
                law[left + right] = law.get(left + right, 0.0) + part
    single = pair.sequence_law(0, length)
    wanted = {a + b: v * w for a, v in single.items() for b, w in single.items()}
    assert gap(law, wanted) < 1e-12


def test_one_hot_drafts_are_exact() -> None:
    """A block without q: accept with probability p(x), else draw from p without x."""
    pair = three_token_pair()
    for drafts in itertools.product(range(3), repeat=2):
        block = Block(
            ids=np.array([drafts], np.int32),
            confidence=np.ones((1, 2), np.float32),
            q_ids=np.empty((0, 2, 3), np.int32),
            q_probs=np.empty((0, 2, 3), np.float32),
            has_q=np.zeros(1, np.uint8),
        )
        previous = (0, *drafts)
        ratios = [pair.p[x, y] for x, y in itertools.pairwise(previous)]
        finals = [t for x in previous for t in partial_sums(pair.p[x])]
        for x, y in itertools.pairwise(previous):
            rest = pair.p[x].copy()
            rest[y] = 0
            finals += partial_sums(rest / rest.sum())
        points, weights = product(
            [*(intervals([r], ends=True) for r in ratios), intervals(finals, ends=True)]
        )
        num = len(weights)
        accepts, lasts = np.zeros((num, 1, 4)), np.empty((num, 1, 4))
        accepts[:, 0, 1:3], lasts[:] = points[:, :2], points[:, 2, None, None]
        randomness = Injected({Stream.ACCEPT: accepts, Stream.RESIDUAL: lasts, Stream.BONUS: lasts})
        settings = [sampling(seed=n, mode="rejection") for n in range(num)]
        many = Block(
            ids=np.tile(block.ids, (num, 1)),
            confidence=np.tile(block.confidence, (num, 1)),
            q_ids=block.q_ids,
            q_probs=block.q_probs,
            has_q=np.zeros(num, np.uint8),
        )
        verdicts = pair.verify([(0,)] * num, settings, many, np.full(num, 2), randomness)
        law: dict[tuple[int, ...], float] = {}
        for verdict, weight in zip(verdicts, weights, strict=True):
            law[verdict.token_ids] = law.get(verdict.token_ids, 0.0) + weight
        assert gap(pair.complete(law, 3), pair.sequence_law(0, 3)) < 1e-12
