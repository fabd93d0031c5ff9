"""Synthetic steps: the shape that is asked for, and nothing left of it."""

from __future__ import annotations

import pytest

from cluster.errors import InvalidRequest
from tests.verifier_service.vllm.fake_core import NUM_BLOCKS, FakeCore, make_engine
from verifier_service.engine import StepShape
from verifier_service.profile_shapes import ladder
from verifier_service.profiling import measure_profile
from verifier_service.vllm.engine import VllmEngine


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


@pytest.fixture
def engine(core: FakeCore) -> VllmEngine:
    """6 requests, 32 tokens a step, 48 positions a request, KV for 64."""
    return make_engine(core)


def check_empty(core: FakeCore) -> None:
    assert not core.held
    assert core.free_blocks == NUM_BLOCKS
    assert not core.cached


@pytest.mark.parametrize(
    "shape",
    [
        StepShape(num_tokens=1, row_tokens=1, context=0),
        StepShape(num_tokens=1, row_tokens=1, context=7),
        StepShape(num_tokens=19, context=3),
        StepShape(num_tokens=6, row_tokens=1, context=5),
        StepShape(num_tokens=8, context=5, num_prefill=11),
        StepShape(num_tokens=0, context=6, num_prefill=9),
    ],
)
def test_the_step_has_its_shape(core: FakeCore, engine: VllmEngine, shape: StepShape) -> None:
    """Rows of the widths asked for, at their context, and the chunk behind its own."""
    ran = []
    step = core.step
    core.step = lambda plan, limit: ran.append(step(plan, limit)) or ran[-1]  # type: ignore[method-assign]
    assert engine.measure_step(shape) > 0
    timed = ran[-2]  # the last one only has workers forget
    spans = tuple(row.num_tokens for row in timed.rows)
    assert spans == shape.spans
    context = max(shape.context, 1)
    firsts = [row.first for row in timed.rows]
    assert firsts == [context] * shape.num_rows + [shape.context] * bool(shape.num_prefill)
    assert not ran[-1].rows
    assert not timed.finished, "a request that ends would be freed inside the timed step"
    check_empty(core)
    assert core.num_forgotten == 1


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        (StepShape(num_tokens=0, context=1), "outside 1..32"),
        (StepShape(num_tokens=33, context=1), "outside 1..32"),
        (StepShape(num_tokens=30, context=1, num_prefill=3), "outside 1..32"),
        (StepShape(num_tokens=8, context=40), "48 positions"),
        (StepShape(num_tokens=7, row_tokens=1, context=1), "6 requests"),
        (StepShape(num_tokens=6, row_tokens=1, context=1, num_prefill=2), "6 requests"),
        (StepShape(num_tokens=4, row_tokens=1, context=24), "do not fit the KV"),
    ],
)
def test_what_does_not_fit(core: FakeCore, engine: VllmEngine, shape: StepShape, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        engine.measure_step(shape)
    check_empty(core)


def test_a_core_that_fails_leaves_nothing(core: FakeCore, engine: VllmEngine) -> None:
    core.raises = RuntimeError("device lost")
    with pytest.raises(RuntimeError, match="device lost"):
        engine.measure_step(StepShape(num_tokens=8, context=4))
    check_empty(core)


def test_a_whole_profile(core: FakeCore, engine: VllmEngine) -> None:
    """Every size of the ladder that fits, up to the whole step."""
    profile = measure_profile(engine, budget_s=0.5, near=2, far=8)
    assert profile.num_tokens[0] == 1
    assert profile.num_tokens[-1] == 32
    assert set(profile.num_tokens) <= {*ladder(32), *range(1, 33)}
    assert list(profile.step_s) == sorted(profile.step_s)
    check_empty(core)
