"""The never-falling fit."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cluster.isotonic import isotonic


def test_isotonic_by_hand() -> None:
    assert isotonic([1, 2, 3]) == (1, 2, 3)
    assert isotonic([3, 1, 2]) == (2, 2, 2)
    assert isotonic([1, 4, 2, 5]) == (1, 3, 3, 5)
    assert isotonic([]) == ()


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=12))
def test_isotonic_is_the_least_squares_fit(values: list[float]) -> None:
    fit = np.array(isotonic(values))
    assert len(fit) == len(values)
    assert (np.diff(fit) >= -1e-12).all()
    # Optimality: with a closed convex cone, the residual is orthogonal to the fit and has no
    # positive inner product with any never-falling direction (the steps span them).
    residual = np.array(values) - fit
    assert abs(residual @ fit) < 1e-6
    for start in range(1, len(values)):
        assert residual[start:].sum() < 1e-6
    assert abs(residual.sum()) < 1e-6
