"""The start-up profile: complete at its ends, never falling, bounded in time, told apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from cluster.errors import ConfigError, InvalidRequest
from tests.fakes import FakeEngine
from verifier_service.engine import StepShape
from verifier_service.profile_shapes import ladder
from verifier_service.profiling import (
    StepProfile,
    check_profile,
    fingerprint_of,
    measure_profile,
)

TOKEN_S, ROW_S, CONTEXT_S, PAIR_S, PREFILL_S = 2e-3, 4e-4, 4e-6, 1e-6, -4e-4
FIXED_S = 0.04


def test_ladder() -> None:
    assert ladder(1) == (1,)
    assert ladder(4) == (1, 2, 3, 4)
    assert ladder(128) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
    assert ladder(100)[-3:] == (64, 96, 100)
    assert ladder(600)[-4:] == (128, 256, 512, 600)


def linear(shape: StepShape) -> float:
    """A machine without stairs."""
    tokens = shape.num_tokens + shape.num_prefill
    return (
        FIXED_S
        + TOKEN_S * tokens
        + ROW_S * shape.num_rows
        + CONTEXT_S * shape.sum_context
        + PAIR_S * shape.num_pairs
        + PREFILL_S * shape.num_prefill
    )


class Timed(FakeEngine):
    """Steps that take what ``law`` says on a clock of their own, with the calls recorded."""

    def __init__(self, law: Callable[[StepShape], float] = linear, **limits: int) -> None:
        super().__init__(
            **{"max_step_tokens": 128, "max_model_len": 2048, "max_requests": 64, **limits},
            kv_blocks=2048,
        )
        self.calls: list[StepShape] = []
        self.now = 0.0
        self._law = law

    def clock(self) -> float:
        return self.now

    def measure_step(self, shape: StepShape) -> float:
        if shape.context + max(shape.spans) > self.limits.max_model_len:
            raise InvalidRequest("too long")
        self.calls.append(shape)
        step_s = self._law(shape)
        self.now += step_s
        return step_s


def measure(engine: Timed, budget_s: float = 1000.0, **options: int) -> StepProfile:
    return measure_profile(engine, budget_s=budget_s, clock=engine.clock, **options)


def predict(profile: StepProfile, shape: StepShape) -> float:
    costs = profile.costs
    tokens = shape.num_tokens + shape.num_prefill
    return float(
        np.interp(tokens, profile.num_tokens, profile.step_s)
        + costs.row_s * shape.num_rows
        + costs.context_s * shape.sum_context
        + costs.pair_s * shape.num_pairs
        + costs.prefill_s * shape.num_prefill
    )


def test_costs_are_told_apart_exactly_without_noise() -> None:
    profile = measure(Timed())
    assert set(ladder(128)) <= set(profile.num_tokens)
    costs = profile.costs
    assert costs.row_s == pytest.approx(ROW_S, rel=0.02)
    assert costs.context_s == pytest.approx(CONTEXT_S, rel=0.02)
    assert costs.pair_s == pytest.approx(PAIR_S, rel=0.02)
    assert costs.prefill_s == pytest.approx(PREFILL_S, rel=0.02)
    expected = FIXED_S + TOKEN_S * np.array(profile.num_tokens)
    assert np.allclose(profile.step_s, expected, rtol=0.005)
    assert profile.noise == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_a_noisy_machine_is_predicted_at_twenty_times_the_context(seed: int) -> None:
    rng = np.random.default_rng(seed)
    engine = Timed(
        lambda shape: linear(shape) * float(rng.lognormal(0.0, 0.02)), max_model_len=8192
    )
    profile = measure(engine, near=64, far=256)
    assert max(shape.context for shape in engine.calls) == 256
    for shape in (
        StepShape(num_tokens=1, context=5120),
        StepShape(num_tokens=8, context=5120),
        StepShape(num_tokens=16, row_tokens=4, context=5120),
    ):
        assert predict(profile, shape) == pytest.approx(linear(shape), rel=0.10)
    assert 0.005 < profile.noise < 0.04


def test_a_stair_is_found_where_it_is() -> None:
    engine = Timed(lambda shape: 0.01 if shape.num_tokens + shape.num_prefill <= 72 else 0.02)
    profile = measure(engine)
    at = profile.num_tokens.index(72)
    assert profile.num_tokens[at + 1] == 73
    assert profile.step_s[at] == pytest.approx(0.01)
    assert profile.step_s[-1] == pytest.approx(0.02)
    assert len(profile.num_tokens) < len(ladder(128)) + 10, "and nothing else is looked into"


def test_a_straight_line_is_not_halved_for_ever() -> None:
    assert len(measure(Timed()).num_tokens) < 2 * len(ladder(128))


def test_an_outlier_does_not_count() -> None:
    engine = Timed()
    engine._law = lambda shape: 9.0 if len(engine.calls) == 9 else linear(shape)
    profile = measure(engine)
    expected = FIXED_S + TOKEN_S * np.array(profile.num_tokens)
    assert np.allclose(profile.step_s, expected, rtol=0.005)


def test_a_dip_is_pooled() -> None:
    engine = Timed(lambda shape: 0.01 if shape.num_tokens == 3 else 0.02 * shape.num_tokens + 0.001)
    assert (np.diff(measure(engine).step_s) >= 0).all()


def test_costs_that_would_be_negative_are_none() -> None:
    engine = Timed(lambda shape: 0.05 - 1e-4 * shape.num_rows + 1e-3 * shape.num_tokens)
    costs = measure(engine).costs
    assert costs.row_s == 0.0
    assert costs.context_s >= 0.0
    assert costs.pair_s >= 0.0


def test_out_of_time_still_gives_both_ends() -> None:
    engine = Timed()
    profile = measure(engine, budget_s=1e-6)
    assert profile.num_tokens == (1, 128)
    assert profile.costs.row_s == pytest.approx(0.0, abs=1e-9), "two shapes tell no costs"
    engine = Timed()
    measure(engine, budget_s=2.0)
    longest_s = max(map(linear, engine.calls))
    assert engine.now < 2.0 + longest_s  # at most one step past the budget


@pytest.mark.parametrize("max_model_len", [12, 100, 256])
def test_contexts_fit_the_model(max_model_len: int) -> None:
    engine = Timed(max_model_len=max_model_len, max_step_tokens=16)
    profile = measure(engine, near=10_000, far=20_000)
    assert set(ladder(16)) <= set(profile.num_tokens)
    assert max(shape.context for shape in engine.calls) <= max_model_len


def test_no_more_rows_than_requests() -> None:
    engine = Timed(max_requests=4, max_step_tokens=64)
    measure(engine)
    assert max(shape.num_rows for shape in engine.calls) <= 4


def test_no_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="budget_s"):
        measure_profile(FakeEngine(), budget_s=0.0)


def test_a_profile_of_another_engine_is_refused() -> None:
    engine = Timed()
    profile = measure(engine)
    assert profile.fingerprint == fingerprint_of(engine.limits)
    check_profile(profile, engine.limits)
    check_profile(StepProfile(num_tokens=(1,), step_s=(0.1,)), engine.limits)
    for change in ({"model_fingerprint": "other"}, {"platform": "another device"}):
        with pytest.raises(ConfigError, match="anew"):
            check_profile(profile, replace(engine.limits, **change))
