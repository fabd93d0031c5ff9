"""The step profile, measured on vLLM: usable, plausible, and without a trace."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cluster.errors import InvalidRequest
from tests.frames import make_admission
from tests.verifier_service.conformance.rounds import Draft, Rounds
from tests.verifier_service.conformance.targets import Target
from tests.verifier_service.torch_targets import prompt
from verifier_service.engine import Engine, StepShape
from verifier_service.profiling import check_profile, fingerprint_of, measure_profile


def test_measured_and_forgotten(engine: Engine, tiny: Target) -> None:
    """Nothing is held or cached afterwards, and a prompt of the measured token is not found."""
    ids = prompt(40, 900)
    Rounds(engine).run([make_admission(0, ids)])
    limits = engine.limits
    profile = measure_profile(engine, budget_s=1.0, near=8, far=40)
    assert profile.num_tokens[0] == 1
    assert profile.num_tokens[-1] == limits.max_step_tokens
    assert all(0 < step_s < math.inf for step_s in profile.step_s)
    assert list(profile.step_s) == sorted(profile.step_s)
    assert profile.fingerprint == fingerprint_of(limits)
    assert "vllm 0.32" in limits.platform
    check_profile(profile, limits)
    for start in (ids, [0] * 40):
        rounds = Rounds(engine)
        rounds.run([make_admission(0, start)])
        assert rounds.num_cached == 0
        assert rounds.emitted(0) == tiny.greedy(start, 8)


def test_it_predicts_steps(engine: Engine) -> None:
    """A real step of many shapes: finite, over nothing, and no less for more tokens."""
    profile = measure_profile(engine, budget_s=1.0, near=8, far=40)
    costs = profile.costs

    def predicted(tokens: int, rows: int, prefill: int, context: int, pairs: int) -> float:
        base = float(np.interp(tokens, profile.num_tokens, profile.step_s))
        extra = costs.row_s * rows + costs.context_s * context
        return base + extra + costs.pair_s * pairs + costs.prefill_s * prefill

    rounds = Rounds(engine)
    rounds.add(*[make_admission(rid, prompt(9, 910 + rid), max_new_tokens=30) for rid in range(6)])
    times = []
    for num_draft in (0, 3, 6):
        result = rounds.step(lambda rid, ids, num=num_draft: Draft(ids=[1] * num))  # type: ignore[misc]
        num_rows = len(result.rid)
        times.append(
            predicted(
                result.num_real_tokens,
                num_rows,
                result.num_prefill_tokens,
                result.sum_context,
                result.num_pairs,
            )
        )
        assert result.step_s > 0
    assert all(0 < step_s < math.inf for step_s in times)


@pytest.mark.parametrize(
    "shape",
    [
        StepShape(num_tokens=1, row_tokens=1, context=0),
        StepShape(num_tokens=16, context=0),
        StepShape(num_tokens=64, context=80),
        StepShape(num_tokens=16, row_tokens=1, context=33),
        StepShape(num_tokens=8, context=31, num_prefill=40),
        StepShape(num_tokens=0, context=32, num_prefill=17),
    ],
)
def test_any_shape(engine: Engine, shape: StepShape) -> None:
    """Twice, with as much KV free as before."""
    assert engine.measure_step(shape) > 0
    assert engine.measure_step(shape) > 0


def test_a_shape_past_the_limits(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="96 positions"):
        engine.measure_step(StepShape(num_tokens=8, context=89))
    with pytest.raises(InvalidRequest, match="KV"):
        engine.measure_step(StepShape(num_tokens=60, row_tokens=4, context=90))
