"""Algorithm 1 against the paper's own words."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.scheduler import causal_lengths


def reference(survival: np.ndarray, sps: np.ndarray, fixed: int) -> tuple[list[int], float]:
    """The paper's loop, one draft at a time."""
    num = len(survival)
    walk = [(-survival[r, j], r, j) for r, j in np.ndindex(survival.shape) if survival[r, j] > 0]
    tokens, tau, lengths = num + fixed, float(num), [0] * num
    best = tau * sps[tokens]
    for negative, r, j in sorted(walk):
        if tokens + 1 >= len(sps):
            break
        if not (tau - negative) * sps[tokens + 1] > best:
            break
        tokens, tau = tokens + 1, tau - negative
        best, lengths[r] = tau * sps[tokens], j + 1
    return lengths, tau


@st.composite
def steps(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    rows, gamma = draw(st.integers(1, 5)), draw(st.integers(0, 6))
    grid = st.sampled_from([0.0, 0.25, 0.5, 0.5, 0.9, 1.0])  # ties and zeros on purpose
    confidence = np.array([[draw(grid) for _ in range(gamma)] for _ in range(rows)])
    fixed = draw(st.integers(0, 4))
    size = rows + fixed + draw(st.integers(1, rows * gamma + 3))
    step_s = np.cumsum([draw(st.floats(0.001, 1.0)) for _ in range(size)])
    return np.cumprod(confidence.reshape(rows, gamma), axis=1), 1 / step_s, fixed


@given(steps())
def test_equals_the_papers_loop(step: tuple[np.ndarray, np.ndarray, int]) -> None:
    survival, sps, fixed = step
    got = causal_lengths(survival, sps, num_fixed_tokens=fixed)
    lengths, tau = reference(survival, sps, fixed)
    assert got.lengths.tolist() == lengths
    assert got.tau == pytest.approx(tau, rel=1e-12)
    assert got.lengths.dtype == np.int32


def test_never_looks_past_the_stop() -> None:
    """Values behind the first draft that does not pay change nothing, however good."""
    sps = np.array([np.nan, 1.0, 0.5, 0.45])
    for second in (0.0, 0.72, 0.8):
        assert causal_lengths(np.array([[0.8, second]]), sps).lengths.tolist() == [0]


def test_free_tokens_are_all_taken() -> None:
    got = causal_lengths(np.array([[0.9, 0.1], [0.2, 0.0]]), np.ones(8))
    assert got.lengths.tolist() == [2, 1]
    assert got.tau == pytest.approx(2 + 0.9 + 0.1 + 0.2)


def test_ties_go_to_the_lower_row_then_position() -> None:
    sps = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.1, 0.1])
    assert causal_lengths(np.full((2, 2), 0.5), sps).lengths.tolist() == [2, 0]


def test_profile_caps_the_step() -> None:
    assert causal_lengths(np.full((2, 3), 0.9), np.ones(5)).lengths.sum() == 2


def test_nothing_to_schedule() -> None:
    got = causal_lengths(np.zeros((3, 0)), np.ones(4))
    assert got.lengths.tolist() == [0, 0, 0]
    assert got.tau == 3
    assert causal_lengths(np.zeros((0, 5)), np.ones(4)).lengths.tolist() == []
