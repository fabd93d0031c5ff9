"""The throughput profile of one verifier: seconds of a step as a function of its tokens.

It starts from the table that the verifier measured (`cluster.wire.Lease`) and remembers how well
it predicted the steps that really ran. Pure: times come in as arguments.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.errors import FrameError
from cluster.wire import F32, I32

F64 = NDArray[np.float64]

_FORGET: Final = 0.05
"""Weight of the newest step in the running means."""
_MAX_RATIO: Final = 4.0
"""A single step counts as at most this many times faster or slower than predicted."""


class ThroughputProfile:
    """SPS(B) of paper section 3.2.2, with the time between steps charged as well.

    The verifier sends a staircase that never falls; what falls all the same is levelled up. The
    points are joined by straight lines: stairs between them would be invented, and each would trap
    the early stop of Algorithm 1.

    One factor ``scale`` follows the machine's speed of today. It moves all points alike: the
    shape, on which decisions rest, stays the measured one.

    Args:
        tokens: [n] rising batch sizes B.
        step_s: [n] measured seconds of one step at each.

    Raises:
        FrameError: no points, or points that are not positive and rising. A lane never runs
            without a table.
    """

    def __init__(self, tokens: I32, step_s: F32) -> None:
        if len(tokens) == 0 or len(tokens) != len(step_s):
            raise FrameError(f"profile of {len(tokens)} sizes and {len(step_s)} times")
        if tokens[0] < 1 or (np.diff(tokens) <= 0).any() or (step_s <= 0).any():
            raise FrameError("profile: sizes must be positive and rising, times positive")
        self._tokens = tokens.astype(np.float64)
        self._step_s = np.maximum.accumulate(step_s.astype(np.float64))
        self.scale = 1.0
        self.overhead_s = 0.0
        """Running mean of the time between two steps, drafting included."""
        self.num_steps = 0
        self.mean_error = 0.0
        """Running mean of \\|predicted - actual\\| / actual."""

    def step_s(self, num_tokens: int) -> float:
        """Predicted seconds of a step of this many tokens."""
        return float(self._curve(np.array([num_tokens], np.float64))[0])

    def sps(self, max_tokens: int) -> F64:
        """Steps per second at B = 0..max_tokens, indexed by B."""
        sizes = np.arange(max_tokens + 1, dtype=np.float64)
        rates: F64 = 1.0 / (self._curve(sizes) + self.overhead_s)
        return rates

    def record(self, *, num_tokens: int, step_s: float) -> None:
        """Learn from a step that ran with ``num_tokens`` real tokens in ``step_s`` seconds."""
        if num_tokens < 1 or step_s <= 0:
            return
        predicted = self.step_s(num_tokens)
        error = abs(predicted - step_s) / step_s
        ratio = min(max(step_s / predicted, 1 / _MAX_RATIO), _MAX_RATIO)
        self.scale *= ratio**_FORGET
        self.mean_error += (error - self.mean_error) * (_FORGET if self.num_steps else 1.0)
        self.num_steps += 1

    def record_gap(self, gap_s: float) -> None:
        """Learn from the time that passed between two steps of a lane with work in hand."""
        self.overhead_s += _FORGET * (max(gap_s, 0.0) - self.overhead_s)

    def _curve(self, sizes: F64) -> F64:
        inside = np.interp(sizes, self._tokens, self._step_s)
        if len(self._tokens) == 1:
            return inside * self.scale
        # Past the last point the line through the first and last one goes on.
        slope = (self._step_s[-1] - self._step_s[0]) / (self._tokens[-1] - self._tokens[0])
        beyond = np.maximum(sizes - self._tokens[-1], 0.0) * slope
        curve: F64 = (inside + beyond) * self.scale
        return curve
