"""Production end to end with its own keyed numbers: 100,000 rounds against the target's law.

Enumeration proves the decisions; this proves the numbers fed to them. Each test has a twin that
must fail: a target off by 2% of its mass, and a generator whose streams are one.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chisquare

from cluster.noise import KEYED, Randomness, Stream
from tests.exactness.test_rejection import markov_pair, three_token_pair
from tests.exactness.tiny import Pair, sampling

NUM_ROUNDS = 100_000


class OneStream:
    """The fault that biased a real engine: drafting and judging from the same numbers."""

    def uniform(self, stream: Stream, seeds: np.ndarray, positions: object, indices: object):  # type: ignore[no-untyped-def]
        return KEYED.uniform(Stream.DRAFT, seeds, positions, indices)  # type: ignore[arg-type]


def p_value(
    pair: Pair,
    mode: str,
    *,
    drafted: bool = True,
    p: np.ndarray | None = None,
    randomness: Randomness = KEYED,
) -> float:
    """Of the first token, and of the first two, after one round from anchor A: the lesser one."""
    contexts = [(0,)] * NUM_ROUNDS
    settings = [sampling(seed=n, mode=mode) for n in range(NUM_ROUNDS)]
    block = pair.draft(contexts, settings, randomness)
    lengths = np.full(NUM_ROUNDS, pair.gamma if drafted else 0)
    verdicts = pair.verify(contexts, settings, block, lengths, randomness, p=p)
    tokens = np.array([v.token_ids[0] for v in verdicts])
    second = np.array([v.token_ids[1] if len(v.token_ids) > 1 else -1 for v in verdicts])
    observed, expected = [], []
    for x in range(pair.vocab_size):
        observed.append((tokens == x).sum())
        expected.append(NUM_ROUNDS * pair.p[0, x])
    first = chisquare(observed, expected).pvalue
    if not drafted:
        return float(first)
    # Where the round ended after one token the test draws the second from p: completed so, the
    # pair must have the target's joint law.
    rng = np.random.default_rng(11)
    missing = np.flatnonzero(second < 0)
    cdf = pair.p[tokens[missing]].cumsum(axis=1)
    second[missing] = (rng.random(len(missing))[:, None] > cdf).sum(axis=1)
    cells = tokens * pair.vocab_size + second
    wanted = np.array(
        [
            pair.p[0, x] * pair.p[x, y]
            for x in range(pair.vocab_size)
            for y in range(pair.vocab_size)
        ]
    )
    joint = chisquare(np.bincount(cells, minlength=len(wanted)), NUM_ROUNDS * wanted).pvalue
    return float(min(first, joint))


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
@pytest.mark.parametrize("drafted", [True, False])
def test_keyed_numbers_give_the_target(mode: str, drafted: bool) -> None:
    assert p_value(three_token_pair(), mode, drafted=drafted) > 1e-3


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_catches_two_percent(mode: str) -> None:
    pair = markov_pair()
    off = pair.p + np.array([0.02, -0.02])
    assert p_value(pair, mode, p=off) < 1e-9


def test_catches_shared_streams() -> None:
    assert p_value(markov_pair(), "rejection", randomness=OneStream()) < 1e-9
