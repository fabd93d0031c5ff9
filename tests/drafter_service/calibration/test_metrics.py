"""Figures of calibration against values worked out by hand and by brute force."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.calibration.metrics import (
    auc,
    brier,
    ece,
    ece_noise,
    equal_mass_ece,
    equal_mass_noise,
)


def test_ece_by_hand() -> None:
    # Bins of width 1/2. Low: 0.1, 0.3 (mean 0.2) against 0, 1 (0.5). High: 0.5, 0.9, 1.0 (0.8)
    # against 1, 1, 0 (2/3).
    value = ece([0.1, 0.3, 0.5, 0.9, 1.0], [0, 1, 1, 1, 0], num_bins=2)
    assert value == pytest.approx(2 / 5 * 0.3 + 3 / 5 * (0.8 - 2 / 3))


def test_ece_averages_within_a_bin_and_not_across() -> None:
    confidence, outcome = [0.41, 0.59], [1, 0]
    assert ece(confidence, outcome, num_bins=1) == pytest.approx(0.0)
    assert ece(confidence, outcome, num_bins=2) == pytest.approx(0.59)


def test_equal_mass_ece_by_hand() -> None:
    # Sorted: (0.01, 1), (0.02, 0) | (0.03, 0), (0.9, 1): one bin of equal width holds the first
    # three, bins of equal mass split them.
    confidence, outcome = [0.9, 0.03, 0.01, 0.02], [1, 0, 1, 0]
    value = equal_mass_ece(confidence, outcome, num_bins=2)
    assert value == pytest.approx((abs(0.03 - 1) + abs(0.93 - 1)) / 4)
    assert ece(confidence, outcome, num_bins=2) == pytest.approx((abs(0.06 - 1) + 0.1) / 4)


def test_equal_mass_bins_are_never_empty() -> None:
    assert equal_mass_ece([0.2, 0.9], [0, 1], num_bins=15) == pytest.approx(0.15)


def test_brier_by_hand() -> None:
    assert brier([0.0, 0.5, 0.8], [0, 1, 1]) == pytest.approx((0 + 0.25 + 0.04) / 3)


def test_auc_by_hand() -> None:
    assert auc([0.1, 0.4, 0.4, 0.8], [0, 0, 1, 1]) == pytest.approx((1 + 0.5 + 1 + 1) / 4)
    assert auc([0.3, 0.6], [1, 1]) is None
    assert auc([0.3, 0.6], [0, 0]) is None


@given(
    st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=40),
)
def test_auc_counts_pairs(samples: list[tuple[int, bool]]) -> None:
    won = [c for c, outcome in samples if outcome]
    lost = [c for c, outcome in samples if not outcome]
    got = auc([c / 6 for c, _ in samples], [outcome for _, outcome in samples])
    if not won or not lost:
        assert got is None
        return
    pairs = [(w > f) + (w == f) / 2 for w in won for f in lost]
    assert got == pytest.approx(sum(pairs) / len(pairs))


@pytest.mark.parametrize(
    ("metric", "noise"), [(ece, ece_noise), (equal_mass_ece, equal_mass_noise)]
)
def test_noise_is_what_a_perfect_confidence_shows(
    metric: Callable[..., float], noise: Callable[..., float]
) -> None:
    rng = np.random.default_rng(0)
    confidence = rng.beta(1, 3, 400)
    seen = [metric(confidence, rng.random(400) < confidence) for _ in range(400)]
    assert np.mean(seen) == pytest.approx(noise(confidence), rel=0.05)


@pytest.mark.parametrize("metric", [ece, equal_mass_ece, auc, brier])
@pytest.mark.parametrize(
    ("confidence", "outcome", "named"),
    [
        ([], [], "confidence"),
        ([0.5], [0, 1], "confidence"),
        ([1.5], [1], "outside"),
        ([float("nan")], [1], "outside"),
        ([0.5], [0.5], "neither"),
    ],
)
def test_what_is_no_probability_or_outcome_is_refused(
    metric: Callable[[list[float], list[float]], float],
    confidence: list[float],
    outcome: list[float],
    named: str,
) -> None:
    with pytest.raises(ValueError, match=named):
        metric(confidence, outcome)
