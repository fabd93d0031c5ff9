"""One measurement: warm up, count for a while, wait for the last counted answers, sum up."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np

from cluster.errors import ConfigError
from dspark.async_client import AsyncClient
from dspark.bench.asks import Mix
from dspark.bench.figures import Figure, load_figures
from dspark.bench.load import Load, closed_loop, open_loop
from dspark.bench.sample import Sample, Window
from dspark.messages import Model

_LOOK_S: Final = 0.1
"""How often a waiting measurement looks up."""

Progress = Callable[[str, float, Load], None]
"""Told what is going on, the share of the whole that is done, and the load."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a server is loaded, and for how long.

    Raises:
        ConfigError: not exactly one of ``users`` and ``rate``, or of ``duration_s`` and
            ``requests``; or a value out of range.
    """

    users: int | None = None
    """Closed loop: each of them asks again when answered."""
    rate: float | None = None
    """Open loop: Poisson arrivals a second."""
    warm_up_s: float = 5.0
    duration_s: float | None = None
    requests: int | None = None
    """Count until the first so many after the warm-up have ended."""
    drain_s: float = 60.0
    """Most time to wait for the last counted answers; the load goes on meanwhile."""
    raw: bool = False

    def __post_init__(self) -> None:
        for pair in (("users", "rate"), ("duration_s", "requests")):
            if sum(getattr(self, name) is not None for name in pair) != 1:
                raise ConfigError(f"give exactly one of {pair[0]} and {pair[1]}")
        for name in ("users", "rate", "duration_s", "requests"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}: {value}", hint="must be over 0 and finite")
        for name in ("warm_up_s", "drain_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name}: {getattr(self, name)}", hint="0 or more, and finite")


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """What was seen."""

    samples: tuple[Sample, ...]
    counted: tuple[Sample, ...]
    """Those whose latencies count."""
    window: Window
    figures: Figure
    counters: dict[str, float]
    """How much each figure of the router's metrics grew in the window."""
    client: Figure
    """What the measuring cost: ``cpu_share``, of one core; ``late_s``, sending after schedule."""


async def measure(client: AsyncClient, mix: Mix, plan: Plan, progress: Progress) -> Measured:
    """Load the server and count.

    Raises:
        DSparkError: the server is not there; or no counted request came to its end.
    """
    before = await client.get_model()  # an absent server is found before anything is sent
    async with _load(client, mix, plan) as load:
        begin_s = load.clock()
        await _wait(load, lambda: load.clock() - begin_s, plan.warm_up_s, "warm-up", progress)
        before = await client.get_model()
        cpu_s, begin_s = time.process_time(), load.clock()
        counted = await _count(load, begin_s, plan, progress)
        window = Window(begin_s=begin_s, end_s=load.clock())
        cpu_s = time.process_time() - cpu_s
        after = await client.get_model()
        if counted is None:
            counted = [sample for sample in load.samples if window.holds(sample.scheduled_s)]
        await _drain(load, counted, plan.drain_s, progress)
        samples = tuple(load.samples)
        _require_answers(load, counted)
        figures = load_figures(samples, window, counted)
    late_s = [sample.sent_s - sample.scheduled_s for sample in counted]
    return Measured(
        samples=samples,
        counted=tuple(counted),
        window=window,
        figures=figures,
        counters=growth(before, after),
        client={
            "cpu_share": cpu_s / window.length_s,
            "late_s": {"p50": float(np.median(late_s)), "most": max(late_s)},
        },
    )


def growth(before: Model, after: Model) -> dict[str, float]:
    """How much each figure of the metrics grew."""
    metrics: Mapping[str, float] = before.metrics
    return {name: value - metrics.get(name, 0.0) for name, value in sorted(after.metrics.items())}


@asynccontextmanager
async def _load(client: AsyncClient, mix: Mix, plan: Plan) -> AsyncIterator[Load]:
    if plan.users is not None:
        async with closed_loop(client, mix, users=plan.users, raw=plan.raw) as load:
            yield load
    else:
        assert plan.rate is not None, "checked by Plan"
        async with open_loop(client, mix, rate=plan.rate, raw=plan.raw) as load:
            yield load


async def _count(load: Load, begin_s: float, plan: Plan, progress: Progress) -> list[Sample] | None:
    """Wait until the window may close; the requests that count, None for all within it."""
    if plan.duration_s is not None:
        await _wait(load, lambda: load.clock() - begin_s, plan.duration_s, "measuring", progress)
        return None
    assert plan.requests is not None, "checked by Plan"
    which = slice(len(load.samples), len(load.samples) + plan.requests)

    def num_over() -> float:
        return sum(sample.ended_s is not None for sample in load.samples[which])

    await _wait(load, num_over, plan.requests, "measuring", progress)
    return load.samples[which]


async def _drain(load: Load, counted: list[Sample], most_s: float, progress: Progress) -> None:
    until_s = load.clock() + most_s

    def over() -> float:
        done = sum(sample.ended_s is not None for sample in counted)
        return len(counted) if load.clock() >= until_s else done

    await _wait(load, over, len(counted), "waiting for the last answers", progress)


async def _wait(
    load: Load, done: Callable[[], float], whole: float, what: str, progress: Progress
) -> None:
    while (so_far := done()) < whole:
        load.check()
        progress(what, so_far / whole, load)
        await asyncio.sleep(_LOOK_S)
    progress(what, 1.0, load)


def _require_answers(load: Load, counted: list[Sample]) -> None:
    """A measurement of nothing is an error: that of the requests, if they had one."""
    if any(sample.usage is not None for sample in counted):
        return
    for error in load.errors.values():
        raise error
    raise ConfigError(
        f"{len(counted)} requests counted, none was answered in time",
        hint="measure longer, ask for shorter answers, or wait longer for the last ones",
    )
