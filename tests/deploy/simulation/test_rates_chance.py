"""Chance with little noise in its sums."""

from __future__ import annotations

import numpy as np
import pytest

from deploy.simulation.rates_chance import Draws, Lengths
from deploy.simulation.traces import LengthSpec


def test_hands_are_level_and_draws_are_not() -> None:
    draws = Draws(np.random.default_rng(1))
    hand = [draws.uniform() for _ in range(64)]
    assert sorted(int(64 * value) for value in hand) == list(range(64))
    assert hand != sorted(hand)


@pytest.mark.parametrize("mean", [0.1, 0.4, 1.7, 6.0])
def test_rare_events_have_the_mean_and_spread_of_a_poisson_law(mean: float) -> None:
    draws = Draws(np.random.default_rng(2))
    counts = np.array([draws.poisson(mean) for _ in range(6400)])
    assert counts.mean() == pytest.approx(mean, rel=0.05)
    assert counts.var() == pytest.approx(mean, rel=0.1)
    by_hand = counts.reshape(100, 64).sum(axis=1)
    assert by_hand.std() < 0.4 * np.sqrt(64 * mean)  # what independent draws would have


def test_lengths_keep_the_mean_of_their_law() -> None:
    law = LengthSpec(mean=80.0, spread=0.6)
    lengths = Lengths(law, np.random.default_rng(3))
    drawn = np.array([lengths.next() for _ in range(640)])
    assert drawn.mean() == pytest.approx(80.0, rel=0.02)
    assert np.std(np.log(drawn)) == pytest.approx(0.6, rel=0.1)
