"""The step profile of this machine's verifier, measured and then put to the test.

What a replica does at start, and what its router makes of it afterwards, in one process: the table
is measured, then steps of many shapes run, each predicted before and learnt from after.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from cluster.config import Config
from cluster.errors import InvalidRequest
from cluster.profile_snapshot import ProfileSnapshot
from deploy import replica
from router.step_load import StepLoad
from router.throughput import ThroughputProfile
from verifier_service.engine import Engine, EngineLimits, StepShape
from verifier_service.loading import load_engine
from verifier_service.profiling import StepProfile, measure_profile

_REPEATS: Final = 3
"""Of each shape, one after the other: equal steps tell the noise."""
_MOST_ROWS: Final = 16
_MOST_WIDTH: Final = 8
_MOST_CONTEXT: Final = 1024

Tell = Callable[[str], None]


def profile_replica(
    config: Config, *, steps_s: float, seed: int, tell: Tell = lambda line: None
) -> ProfileSnapshot:
    """Load the engine that ``config`` describes, measure it, try the table on other steps.

    Args:
        steps_s: seconds of those steps.
        seed: of their shapes.
        tell: hears what is going on.

    Raises:
        DSparkError: the model cannot be loaded.
    """
    tell(f"loading {config.model.target}")
    target, drafter = replica.folders(config)
    engine = load_engine(
        target,
        model=config.model,
        verifier=config.verifier,
        drafter=drafter if isinstance(drafter, Path) else None,
    )
    tell(f"measuring for up to {config.verifier.profile_budget_s:.0f} s")
    measured = measure_profile(engine, budget_s=config.verifier.profile_budget_s)
    profile = live_profile(measured)
    tell(f"predicting and learning from other steps for {steps_s:.0f} s")
    _play(engine, profile, steps_s, random.Random(seed))
    return profile.snapshot()


def live_profile(measured: StepProfile) -> ThroughputProfile:
    """What a router starts with."""
    return ThroughputProfile(
        np.array(measured.num_tokens, np.int32),
        np.array(measured.step_s, np.float32),
        costs=measured.costs,
        noise=measured.noise,
        fingerprint=measured.fingerprint,
    )


def load_of_shape(shape: StepShape) -> StepLoad:
    """As the router would know it."""
    return StepLoad(
        num_rows=shape.num_rows,
        num_tokens=shape.num_tokens + shape.num_prefill,
        num_prefill=shape.num_prefill,
        sum_context=shape.sum_context,
        num_pairs=shape.num_pairs,
    )


def _play(
    engine: Engine, profile: ThroughputProfile, steps_s: float, shapes: random.Random
) -> None:
    end_s = time.monotonic() + steps_s
    while time.monotonic() < end_s:
        shape = _shape(engine.limits, shapes)
        try:
            for _ in range(_REPEATS):
                profile.record(load_of_shape(shape), engine.measure_step(shape))
        except InvalidRequest:
            continue  # more than this engine's KV holds; the next one is smaller


def _shape(limits: EngineLimits, shapes: random.Random) -> StepShape:
    """A verify step as requests make them: a few rows of equal width and context."""
    width = shapes.randint(1, min(_MOST_WIDTH, limits.max_model_len))
    most_rows = max(min(_MOST_ROWS, limits.max_requests, limits.max_step_tokens // width), 1)
    rows = shapes.randint(1, most_rows)
    return StepShape(
        num_tokens=min(rows * width, limits.max_step_tokens),
        row_tokens=width,
        context=shapes.randint(0, min(_MOST_CONTEXT, limits.max_model_len - width)),
    )
