"""The start-up profile: complete at its ends, never falling, bounded in time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ConfigError
from tests.fakes import FakeEngine
from verifier_service.profiling import isotonic, ladder, measure_profile


def test_ladder() -> None:
    assert ladder(1) == (1,)
    assert ladder(4) == (1, 2, 3, 4)
    assert ladder(128) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
    assert ladder(100)[-3:] == (64, 96, 100)


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


class Clock:
    """Advances by what each measured step claims to take."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(FakeEngine):
    """Steps that take ``step_s`` (and clock time), with the calls recorded."""

    def __init__(self, clock: Clock, step_s: dict[int, list[float]] | None = None) -> None:
        super().__init__(max_step_tokens=16)
        self.calls: list[tuple[int, int]] = []
        self._clock = clock
        self._script = step_s or {}

    def measure_step(self, num_tokens: int, context: int) -> float:
        self.calls.append((num_tokens, context))
        script = self._script.get(num_tokens)
        step_s = script.pop(0) if script else 0.01 * num_tokens
        self._clock.now += step_s
        return step_s


def test_measures_the_whole_ladder_within_a_generous_budget() -> None:
    clock = Clock()
    engine = Timed(clock)
    profile = measure_profile(engine, budget_s=1000.0, clock=clock)
    assert profile.num_tokens == (1, 2, 3, 4, 6, 8, 12, 16)
    assert np.allclose(profile.step_s, 0.01 * np.array(profile.num_tokens))
    assert {context for _, context in engine.calls} == {128}


def test_an_outlier_does_not_count() -> None:
    clock = Clock()
    engine = Timed(clock, {4: [0.04, 9.0, 0.04, 0.04, 0.04]})
    profile = measure_profile(engine, budget_s=1000.0, clock=clock)
    assert np.allclose(profile.step_s, 0.01 * np.array(profile.num_tokens))


def test_a_dip_is_pooled() -> None:
    clock = Clock()
    engine = Timed(clock, {3: [0.01] * 5})
    profile = measure_profile(engine, budget_s=1000.0, clock=clock)
    assert np.allclose(profile.step_s[:4], [0.01, 0.015, 0.015, 0.04])


def test_out_of_time_still_gives_both_ends() -> None:
    clock = Clock()
    profile = measure_profile(Timed(clock), budget_s=1e-6, clock=clock)
    assert profile.num_tokens == (1, 16)
    clock = Clock()
    engine = Timed(clock)
    measure_profile(engine, budget_s=0.3, clock=clock)
    assert clock.now < 0.3 + 0.16  # at most one step past the budget


def test_context_fits_the_model() -> None:
    clock = Clock()
    engine = Timed(clock)
    measure_profile(engine, budget_s=1.0, context=10_000, clock=clock)
    assert {context for _, context in engine.calls} == {engine.limits.max_model_len - 1}


def test_no_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="budget_s"):
        measure_profile(FakeEngine(), budget_s=0.0)
