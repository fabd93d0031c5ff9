"""The live throughput profile of one verifier: seconds of a step as a function of its load.

    T = scale * (tier[tokens] + row * rows + context * sum(context) + pair * pairs
                 + prefill * prompt tokens)

It starts from the table and costs that the verifier measured (`cluster.wire.Lease`), learns from
every step that runs (`router.step_time_filter`), and says how well it predicts. Pure: times come in
as arguments. DESIGN section 6; SPS(B) of paper section 3.2.2 is 1 over `curve_s` plus the gap.
"""

from __future__ import annotations

import bisect
import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.errors import FrameError
from cluster.profile_snapshot import ALARMS, ProfileSnapshot
from cluster.step_costs import StepCosts
from cluster.wire import F32, I32, Lease
from router.prediction_errors import PredictionErrors
from router.step_curve import StepCurve
from router.step_load import StepLoad
from router.step_time_filter import StepTimeFilter

F64 = NDArray[np.float64]

_GAP_GAIN: Final = 0.05
_USUAL_NOISE: Final = 0.03
_EXPLORED: Final = 1 / 64
_GOLDEN: Final = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: its multiples fill the 64-bit circle evenly."""

_FLAT_RISE: Final = 0.02
_FLAT_RANGE: Final = 8
_ENOUGH_STEPS: Final = 64
_ALARMING_ERROR: Final = 0.10


class ThroughputProfile:
    """Predicted and learnt step times.

    The verifier sends a staircase that never falls; what falls all the same is levelled up. The
    points are joined by straight lines: stairs between them would be invented, and each would trap
    the early stop of Algorithm 1. Stairs that were measured (two sizes close by, with a jump
    between) stay.

    Args:
        tokens: [K] rising batch sizes B.
        step_s: [K] seconds of one step at each, without the costs.
        costs: what a step takes on top.
        noise: relative spread of equal steps.
        fingerprint: what it was measured with.

    Raises:
        FrameError: no points, or points that are not positive and rising, or a spread that is
            none. A lane never runs without a table.
    """

    def __init__(
        self,
        tokens: I32,
        step_s: F32,
        *,
        costs: StepCosts | None = None,
        noise: float = _USUAL_NOISE,
        fingerprint: str = "",
    ) -> None:
        if len(tokens) == 0 or len(tokens) != len(step_s):
            raise FrameError(f"profile of {len(tokens)} sizes and {len(step_s)} times")
        good = np.isfinite(step_s).all() and (np.asarray(step_s) > 0).all()
        if tokens[0] < 1 or (np.diff(tokens) <= 0).any() or not good:
            raise FrameError("profile: sizes must be positive and rising, times positive")
        if not 0 <= noise < math.inf:
            raise FrameError(f"profile: a spread of {noise}")
        self.fingerprint = fingerprint
        self.live = True
        """Whether predictions follow the steps that run. It learns in any case."""
        self.context_term = True
        """Whether predictions know of the context."""
        self.overhead_s = 0.0
        """Running mean of the time between two steps, drafting included."""
        self.num_steps = 0
        self._costs = costs or StepCosts()
        self._tokens = np.asarray(tokens).astype(np.float64)
        self._token_list: list[float] = self._tokens.tolist()
        self._prior_s: F64 = np.maximum.accumulate(np.asarray(step_s).astype(np.float64))
        self._filter = StepTimeFilter(self._tokens, self._prior_s, self._costs, noise)
        self._prior = StepCurve(
            self._tokens,
            self._prior_s,
            [
                self._costs.row_s,
                self._costs.context_s,
                self._costs.pair_s,
                self._costs.prefill_s,
            ],
        )
        self._now = self._prior
        self._errors = PredictionErrors()
        self._tier_steps = [0] * len(self._token_list)

    @classmethod
    def of_lease(cls, lease: Lease) -> ThroughputProfile:
        """What the verifier measured.

        Raises:
            FrameError: a table that is none.
        """
        return cls(
            lease.profile_tokens,
            lease.profile_step_s,
            costs=StepCosts(
                row_s=lease.profile_row_s,
                context_s=lease.profile_context_s,
                pair_s=lease.profile_pair_s,
                prefill_s=lease.profile_prefill_s,
            ),
            noise=lease.profile_noise,
            fingerprint=lease.profile_fingerprint,
        )

    # --- predict ------------------------------------------------------------------------------

    def step_s(self, load: StepLoad) -> float:
        """Predicted seconds of a step."""
        curve = self._now if self.live else self._prior
        row, context, pair, prefill = curve.costs
        seconds = curve.tier_s(load.num_tokens) + row * load.num_rows + prefill * load.num_prefill
        if self.context_term:
            seconds += context * load.sum_context + pair * load.pairs
        return max(seconds, curve.least_s)

    def curve_s(self, base: StepLoad, max_tokens: int) -> F64:
        """Predicted seconds [max_tokens + 1] of the step ``base`` grown by draft tokens, by its
        total number of tokens; meaningful from ``base.num_tokens`` up. Never falls.

        A draft token attends to as many positions as the rows of ``base`` do on average.
        """
        curve = self._now if self.live else self._prior
        row, context, pair, prefill = curve.costs
        constant = row * base.num_rows + prefill * base.num_prefill
        seconds = curve.tiers_s(max_tokens) + constant
        if self.context_term:
            per_token = pair * base.mean_context
            at_base = context * base.sum_context + pair * base.pairs
            seconds += at_base - per_token * base.num_tokens
            if per_token:
                seconds += per_token * np.arange(max_tokens + 1)
        return np.maximum(seconds, curve.least_s, out=seconds)

    # --- learn --------------------------------------------------------------------------------

    def record(self, load: StepLoad, step_s: float) -> None:
        """Learn from a step that ran (not from the one that was planned). Steps without tokens or
        time say nothing."""
        if load.num_tokens < 1 or not 0 < step_s < math.inf:
            return
        self._errors.add(load, self.step_s(load), step_s)
        self._tier_steps[self._nearest(load.num_tokens)] += 1
        self.num_steps += 1
        self._filter.update(load, step_s, context_term=self.context_term)
        self._now = StepCurve(self._tokens, self._filter.tiers_s, self._filter.costs_s)

    def record_gap(self, gap_s: float) -> None:
        """Learn from the time that passed between two steps of a lane with work in hand."""
        self.overhead_s += _GAP_GAIN * (max(gap_s, 0.0) - self.overhead_s)

    # --- explore ------------------------------------------------------------------------------

    def explore(self, step_id: int) -> int:
        """Tiers by which this step's size should be changed to learn of its neighbours: mostly 0,
        else -1 or 1.

        About one step in 64, evenly spread; a function of the step's number alone, so of no draft.
        """
        place = (step_id * _GOLDEN) % (1 << 64) / (1 << 64)
        if place >= _EXPLORED:
            return 0
        return 1 if place < _EXPLORED / 2 else -1

    def tier_at(self, num_tokens: int, offset: int) -> int:
        """Size of the tier that lies ``offset`` tiers from that of so many tokens."""
        index = min(max(self._nearest(num_tokens) + offset, 0), len(self._token_list) - 1)
        return int(self._token_list[index])

    # --- show ---------------------------------------------------------------------------------

    @property
    def scale(self) -> float:
        """How many times slower the machine is than when it was measured."""
        return self._filter.scale

    @property
    def mean_error(self) -> float:
        """Mean |predicted - actual| / actual of the latest steps."""
        return self._errors.mean

    @property
    def median_error(self) -> float:
        """Median of the same."""
        return self._errors.median

    @property
    def spread(self) -> float:
        """The same of equal steps about each other: the floor of any prediction."""
        return self._errors.spread

    @property
    def alarms(self) -> tuple[str, ...]:
        """Keys of `cluster.profile_snapshot.ALARMS` that hold now."""
        curve = self._now if self.live else self._prior
        wide = self._token_list[-1] >= _FLAT_RANGE * self._token_list[0]
        flat = wide and curve.values[-1] < (1 + _FLAT_RISE) * curve.values[0]
        ran = self.num_steps >= _ENOUGH_STEPS
        inert = ran and curve.values == self._prior.values
        error = ran and self._errors.median > _ALARMING_ERROR
        held = {"flat": flat, "inert": inert, "error": error}
        return tuple(name for name, holds in held.items() if holds)

    def figures(self) -> dict[str, float]:
        """Flat, for metrics; alarms are 0 or 1."""
        alarms = self.alarms
        return {
            "error": self.mean_error,
            "median_error": self.median_error,
            "spread": self.spread,
            "scale": self.scale,
        } | {f"alarm.{name}": float(name in alarms) for name in ALARMS}

    def snapshot(self) -> ProfileSnapshot:
        """Everything, as plain data."""
        row, context, pair, prefill = self._now.costs
        return ProfileSnapshot(
            fingerprint=self.fingerprint,
            tokens=tuple(int(n) for n in self._token_list),
            prior_s=tuple(self._prior.values),
            live_s=tuple(self._now.values),
            prior_costs=self._costs,
            live_costs=StepCosts(row_s=row, context_s=context, pair_s=pair, prefill_s=prefill),
            scale=self.scale,
            overhead_s=self.overhead_s,
            live=self.live,
            context_term=self.context_term,
            num_steps=self.num_steps,
            num_tier_steps=tuple(self._tier_steps),
            median_error=self.median_error,
            mean_error=self.mean_error,
            spread=self.spread,
            alarms=self.alarms,
            recent=tuple(self._errors.recent),
        )

    def _nearest(self, num_tokens: int) -> int:
        """Index of the tier whose size is nearest."""
        tokens = self._token_list
        upper = min(bisect.bisect_left(tokens, num_tokens), len(tokens) - 1)
        lower = max(upper - 1, 0)
        return lower if num_tokens - tokens[lower] < tokens[upper] - num_tokens else upper
