"""The start-up profile: what a step costs here, told apart by measuring steps of many shapes.

It is the prior of the router's live throughput profile (DESIGN 6): a staircase over the number of
tokens that never falls, and what a row, a position of context, a pair of token and position, and a
prompt token add (`cluster.step_costs`). A ladder of batch sizes gives the staircase; steps of as
many tokens in other shapes (many short rows, long contexts, prompt chunks) tell the costs. Then the
steepest gaps of the ladder are halved, so that a real stair is found where it is, and everything is
repeated while time allows: medians count.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from cluster.errors import ConfigError, InvalidRequest
from cluster.fingerprint import profile_fingerprint
from cluster.profile_snapshot import StepRecord
from cluster.step_costs import StepCosts
from cluster.timeouts import require_timeout
from verifier_service.engine import Engine, EngineLimits, StepShape
from verifier_service.profile_fit import fit
from verifier_service.profile_shapes import contexts, ladder, probes, rung, size_of

_MAX_REPEATS: Final = 5
_NEAR: Final = 128
_FAR: Final = 1024
_REFINE_SHARE: Final = 0.25
"""Of the budget, for halving gaps of the ladder."""
_STEEP: Final = 0.15
"""A gap whose times differ by less, relatively, holds no stair worth finding."""
_CURVED: Final = 0.2
"""A middle that lies further off the straight line, as a share of the rise, tells of a stair."""
_MID_REPEATS: Final = 3
_MAX_MIDDLES: Final = 24
_UNKNOWN_NOISE: Final = 0.03
_MAD_TO_STD: Final = 1.48
"""Standard deviation over median absolute deviation, of normal noise."""


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """Measured steps, by rising number of tokens."""

    num_tokens: tuple[int, ...]
    step_s: tuple[float, ...]
    """Seconds without the costs, never falling."""
    costs: StepCosts = field(default_factory=StepCosts)
    noise: float = _UNKNOWN_NOISE
    """Relative standard deviation of equal steps."""
    fingerprint: str = ""
    """See `fingerprint_of`; empty if made by hand: for any engine."""


def fingerprint_of(limits: EngineLimits) -> str:
    """What a profile of this engine holds for."""
    return profile_fingerprint(limits.model_fingerprint, limits.platform)


def check_profile(profile: StepProfile, limits: EngineLimits) -> None:
    """Refuse a profile of another engine, model, device or version.

    Raises:
        ConfigError: it is one.
    """
    wanted = fingerprint_of(limits)
    if profile.fingerprint and profile.fingerprint != wanted:
        raise ConfigError(
            f"step profile of {profile.fingerprint!r} for an engine of {wanted!r}",
            hint="measure it anew: start without a profile",
        )


def measure_profile(
    engine: Engine,
    *,
    budget_s: float,
    near: int = _NEAR,
    far: int = _FAR,
    clock: Callable[[], float] = time.monotonic,
) -> StepProfile:
    """Measure until ``budget_s`` is spent, or everything was measured five times.

    The size 1 and the largest size are always measured, so the table is never empty and never
    extrapolates downwards; shapes that the budget did not reach are left out. A first step warms
    up.

    Args:
        engine: holding no request; called from this thread only.
        near, far: positions behind each row, of the ladder and of the long shapes; shortened to
            what the model and its KV hold.

    Raises:
        ConfigError: no budget.
    """
    require_timeout("budget_s", budget_s)
    limits = engine.limits
    sheet = _Sheet(engine, clock, clock() + budget_s)
    near, far = contexts(limits, near, far)
    sizes = ladder(limits.max_step_tokens)
    rungs = [rung(size, near, limits) for size in sizes]
    ends = (rungs[0], rungs[-1])
    engine.measure_step(rungs[0])
    for shape in ends:
        sheet.measure(shape, always=True)
    plan = sorted({*rungs, *probes(sizes, near, far, limits)}, key=size_of)
    for shape in plan:
        if shape not in ends:
            sheet.measure(shape)
    plan += _refine(sheet, near, clock() + _REFINE_SHARE * budget_s)
    for _ in range(_MAX_REPEATS - 1):
        for shape in sorted(plan, key=size_of):
            sheet.measure(shape)
    return sheet.profile(fingerprint_of(limits))


class _Sheet:
    """Times by shape, and the clock that ends the measuring."""

    def __init__(self, engine: Engine, clock: Callable[[], float], end_s: float) -> None:
        self.limits = engine.limits
        self.times: dict[StepShape, list[float]] = {}
        self.clock = clock
        self._engine = engine
        self._end_s = end_s

    def measure(self, shape: StepShape, *, always: bool = False) -> None:
        """Once more, if there is time and the engine can hold it."""
        if not always and self.clock() >= self._end_s:
            return
        try:
            step_s = self._engine.measure_step(shape)
        except InvalidRequest:
            if always:
                raise
            return
        self.times.setdefault(shape, []).append(step_s)

    def median(self, shape: StepShape) -> float | None:
        """Of the times so far."""
        times = self.times.get(shape)
        return statistics.median(times) if times else None

    def profile(self, fingerprint: str) -> StepProfile:
        """What the times say."""
        samples = [
            StepRecord(
                num_rows=shape.num_rows,
                num_tokens=shape.num_tokens + shape.num_prefill,
                num_prefill=shape.num_prefill,
                sum_context=shape.sum_context,
                num_pairs=shape.num_pairs,
                predicted_s=0.0,
                step_s=statistics.median(times),
            )
            for shape, times in sorted(self.times.items(), key=lambda item: size_of(item[0]))
        ]
        tokens, step_s, costs = fit(samples)
        return StepProfile(
            num_tokens=tokens,
            step_s=step_s,
            costs=costs,
            noise=_noise(self.times.values()),
            fingerprint=fingerprint,
        )


def _refine(sheet: _Sheet, context: int, end_s: float) -> list[StepShape]:
    """Halve the steep gaps of the ladder, small sizes first, as long as the middle is off the
    straight line; the shapes that were added."""
    added: list[StepShape] = []
    rungs = sorted(
        (s for s in sheet.times if s == rung(s.num_tokens, context, sheet.limits)),
        key=lambda shape: shape.num_tokens,
    )
    gaps = list(itertools.pairwise(rungs))
    while gaps and len(added) < _MAX_MIDDLES and sheet.clock() < end_s:
        low, high = gaps.pop(0)
        middle = rung((low.num_tokens + high.num_tokens) // 2, context, sheet.limits)
        low_s, high_s = sheet.median(low), sheet.median(high)
        assert low_s is not None, "a gap between sizes never measured"
        assert high_s is not None
        if middle in (low, high) or high_s < (1 + _STEEP) * low_s:
            continue
        for _ in range(_MID_REPEATS):
            sheet.measure(middle)
        middle_s = sheet.median(middle)
        if middle_s is None:
            break
        added.append(middle)
        share = (middle.num_tokens - low.num_tokens) / (high.num_tokens - low.num_tokens)
        off_s = middle_s - (low_s + share * (high_s - low_s))
        if abs(off_s) > _CURVED * (high_s - low_s):
            gaps[:0] = [(low, middle), (middle, high)]
    return added


def _noise(times: Iterable[list[float]]) -> float:
    """Relative standard deviation of equal steps, the median over the shapes."""
    spreads = []
    for repeats in times:
        if len(repeats) >= _MID_REPEATS:
            middle = statistics.median(repeats)
            deviation = statistics.median(abs(t - middle) for t in repeats)
            spreads.append(_MAD_TO_STD * deviation / middle)
    return statistics.median(spreads) if spreads else _UNKNOWN_NOISE
