"""What rounds take besides steps and drafting, as measured: gaps, and a shared device. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

_GAP_GAIN: Final = 0.05
_LEVEL_GAIN: Final = 0.1
_SHARE_GAIN: Final = 0.05
_SLOW_GAIN: Final = 0.3
_MAX_LOG_RATIO: Final = math.log(2.0)
"""A round counts as at most twice as fast or slow as predicted."""


@dataclass(frozen=True, kw_only=True)
class StepTimed:
    """A step that is over."""

    num_rows: int
    num_drafted: int
    """Rows that blocks were drafted for before it, or beside it."""
    asked: frozenset[int]
    """Ids of those for which one was asked, whether it came or not."""
    num_accepted: int
    """Drafts, of all rows."""
    step_s: float
    predicted_s: float
    plain_s: float
    """Predicted for the same step without drafts."""


class Gap:
    """Time between two steps that has nothing to do with drafting: the link, the router's work."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._num = 0

    def observe(self, gap_s: float, drafting_s: float) -> None:
        """A gap after a step that asked for drafts expected to take so long, 0 if it asked for
        none."""
        rest_s = max(gap_s - drafting_s, 0.0)
        if self._num and rest_s > 4 * self.seconds:
            rest_s = 4 * self.seconds + 1e-4  # a pause of the machine, or of the client
        self._num += 1
        self.seconds += max(_GAP_GAIN, 1 / self._num) * (rest_s - self.seconds)


class SharedDevice:
    """How much longer than predicted drafted rounds take, compared with plain ones.

    The profiles that predict them follow whatever runs most, so that only the contrast between
    drafted and plain rounds tells. Both are fitted at once, as ``m + d x`` to the logarithm of
    actual over predicted time (x: share of the rows that were drafted for): m moves fast and takes
    up what the profile has yet to learn, d moves by as much as x departs from its own mean, so that
    it keeps while there is nothing but steps of one kind.

    Args:
        like: of another load, to begin with.
    """

    def __init__(self, like: SharedDevice | None = None) -> None:
        self.slow_down: float = 0.0 if like is None else like.slow_down
        """d: logarithm of how much longer a round takes that is drafted for all, in [0, log 2]."""
        self.share = 0.5
        """Of rows that were drafted for, lately."""
        self._level = 0.0

    def observe(self, *, share: float, round_s: float, predicted_s: float) -> None:
        """A round that is over, drafting included.

        Args:
            share: of its rows that were drafted for.
        """
        if round_s <= 0 or predicted_s <= 0:
            return
        ratio = math.log(round_s / predicted_s)
        ratio = min(max(ratio, -_MAX_LOG_RATIO), _MAX_LOG_RATIO)
        centred = share - self.share
        error = ratio - self._level - self.slow_down * centred
        self._level += _LEVEL_GAIN * error
        self.slow_down += _SLOW_GAIN * abs(centred) * error * centred
        self.slow_down = min(max(self.slow_down, 0.0), _MAX_LOG_RATIO)
        self.share += _SHARE_GAIN * centred

    def factors(self, shares: F64) -> F64:
        """What to multiply predicted times of rounds by, by share of rows drafted for."""
        factors: F64 = np.exp(self.slow_down * (shares - self.share))
        return factors


class RoundTimes:
    """What the rounds of one lane took. Of each round `gap` is told first, then `step`."""

    def __init__(self) -> None:
        self.rest = Gap()
        self._shared: dict[int, SharedDevice] = {}
        """By binary order of the number of rows: what is off at one load need not be at another."""
        self._latest: tuple[float, float] | None = None
        """The gap before the step that comes back now, and as expected."""

    @property
    def slow_down(self) -> float:
        """How many times longer than predicted a round takes that is drafted for all of its rows,
        compared with plain ones, at the load where that is most."""
        return math.exp(max((shared.slow_down for shared in self._shared.values()), default=0.0))

    def at(self, num_rows: int) -> SharedDevice:
        """What is known of a load; of one that is met for the first time, what is of its like."""
        order = num_rows.bit_length()
        if order not in self._shared:
            like = min(self._shared, key=lambda other: abs(other - order), default=None)
            self._shared[order] = SharedDevice(None if like is None else self._shared[like])
        return self._shared[order]

    def gap(self, gap_s: float, drafting_s: float | None) -> None:
        """How long the verifier lay idle though there was work.

        Args:
            drafting_s: what drafting was expected to take of it; None: not known.
        """
        if drafting_s is not None:
            self._latest = gap_s, self.rest.seconds + drafting_s
        self.rest.observe(gap_s, drafting_s or 0.0)

    def step(self, step: StepTimed) -> float | None:
        """How long a step took.

        Returns:
            Seconds of the round, the gap before the step included; None if no gap was told.
        """
        if self._latest is None:
            return None
        gap_s, expected_gap_s = self._latest
        self._latest = None
        if step.num_rows:
            self.at(step.num_rows).observe(
                share=step.num_drafted / step.num_rows,
                round_s=step.step_s + gap_s,
                predicted_s=step.predicted_s + expected_gap_s,
            )
        return step.step_s + gap_s
