"""The start-up profile: seconds of one verify step at each of a ladder of batch sizes.

It is the prior of the router's live throughput profile (DESIGN 6), so it is a staircase that never
falls: medians of repeats, made monotone by pooling adjacent violators (the least-squares isotonic
fit).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cluster.timeouts import require_timeout
from verifier_service.engine import Engine

_MAX_REPEATS: Final = 5


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """Measured steps, by rising number of tokens."""

    num_tokens: tuple[int, ...]
    step_s: tuple[float, ...]
    """Seconds, never falling."""


def ladder(most: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, ... up to and including ``most``."""
    assert most >= 1, most
    sizes = {1, most}
    power = 2
    while power <= most:
        sizes |= {power, power + power // 2}
        power *= 2
    return tuple(size for size in sorted(sizes) if size <= most)


def isotonic(values: Sequence[float]) -> tuple[float, ...]:
    """The closest never-falling sequence in the least-squares sense."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = float(value), 1
        while pools and pools[-1][0] > mean:
            other, more = pools.pop()
            mean, count = (mean * count + other * more) / (count + more), count + more
        pools.append((mean, count))
    return tuple(mean for mean, count in pools for _ in range(count))


def measure_profile(
    engine: Engine,
    *,
    budget_s: float,
    context: int = 128,
    clock: Callable[[], float] = time.monotonic,
) -> StepProfile:
    """Measure the ladder, sizes first and repeats after, until ``budget_s`` is spent.

    The size 1 and the largest size are always measured, so the table is never empty and never
    extrapolates downwards; sizes that the budget did not reach are left out. A first step warms up.

    Args:
        engine: holding no request; called from this thread only.
        context: positions behind each row.
    """
    require_timeout("budget_s", budget_s)
    end_s = clock() + budget_s
    sizes = ladder(engine.limits.max_step_tokens)
    context = max(0, min(context, engine.limits.max_model_len - 1))
    engine.measure_step(1, context)
    # The ends first, then the rest from small to large: small sizes are where the choices are.
    order = dict.fromkeys((1, sizes[-1], *sizes))
    times: dict[int, list[float]] = {size: [] for size in order}
    for repeat in range(_MAX_REPEATS):
        for size in order:
            if clock() < end_s or (repeat == 0 and size in (1, sizes[-1])):
                times[size].append(engine.measure_step(size, context))
    measured = tuple(size for size in sizes if times[size])
    medians = [statistics.median(times[size]) for size in measured]
    return StepProfile(num_tokens=measured, step_s=isotonic(medians))
