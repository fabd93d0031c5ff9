"""How long a drafter takes, and how long its blocks are on the way: the profile of one link. Pure.

``latency = draft_s(number of blocks) + round trip``. The draft time of a batch is a line in its
size, fixed cost plus cost per block, learnt from the times that the drafter reports. The round trip
is what is left of the time between a step's result and the block behind it: features to the
drafter, the block to us, less what the drafter had a head start over the result.

One freak batch hardly counts (errors are clipped at a few mean deviations), and a lasting change is
followed within some twenty blocks, for the deviation grows with it.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

_FORGET: Final = 0.04
"""Weight of the newest batch in the fit of the draft time."""
_GAIN: Final = 0.125
_DEVIATION_GAIN: Final = 0.25
_CLIP: Final = 3.0
"""An error counts as at most so many mean deviations, and widens the deviation by at most as
much again."""
_LEAST_DEVIATION: Final = 0.02
"""Of the value: timings are not better than that."""
_LEAST_DEVIATION_S: Final = 1e-4
_LEAST_SPREAD: Final = 0.25
"""Variance of the batch sizes, in blocks squared, below which they tell no slope."""
_FAR_OFF: Final = 4.0
"""Squared distance of a batch size from the mean, in variances, from which on it is news."""
_LEAST_MARGIN_S: Final = 0.02
"""Only a block that never comes costs the whole wait; a late one costs the round its drafts."""
_MISSES_TO_GIVE_UP: Final = 3


class _Robust:
    """A running mean with its mean deviation; clips what lies far off."""

    def __init__(self) -> None:
        self.mean = 0.0
        self.deviation = 0.0
        self.num_samples = 0

    def clipped(self, error: float, size: float) -> float:
        """``error`` as far as it counts; the deviation learns of it.

        Args:
            size: of the value that it is an error of.
        """
        # No `min` and `max`: every block of every round comes by here, a few times.
        least, deviation = abs(size) * _LEAST_DEVIATION, self.deviation
        if least < _LEAST_DEVIATION_S:
            least = _LEAST_DEVIATION_S
        bound = _CLIP * (deviation if deviation > least else least)
        grown = abs(error)
        if grown > bound:
            grown = grown if grown < 2 * bound else 2 * bound
            error = bound if error > 0 else -bound
        self.deviation = deviation + _DEVIATION_GAIN * (grown - deviation)
        return error

    def observe(self, value: float) -> None:
        self.num_samples += 1
        if self.num_samples == 1:
            self.mean, self.deviation = value, abs(value) / 2
            return
        mean = self.mean
        self.mean = mean + _GAIN * self.clipped(value - mean, mean)


class LinkProfile:
    """Draft time and round trip of one drafter, as one router sees them.

    Args:
        bound_s: most seconds that anyone waits for a block.
    """

    def __init__(self, bound_s: float) -> None:
        self._bound_s = bound_s
        self._latency = _Robust()
        self._draft = _Robust()
        self._offset = _Robust()
        self._num_missed = 0
        self._missed_at = -math.inf
        """When the last of the batches that were missed had been asked for."""
        self._waits: tuple[int, float] | None = None
        """The latest answer of `wait_s`: all rows of a step ask the same, and nothing is learnt
        in between."""
        self._mean_n = 0.0
        self._mean_draft_s = 0.0
        self._spread_n = 0.0
        self._slope_sum = 0.0
        """Forgetting means of n, of the draft time, of (n - mean)^2 and of the cross term."""
        self._slope_s: float | None = None
        """Seconds per block, as it was when batches last differed in size: hours of batches of one
        size say nothing of others, and take nothing back."""

    @property
    def num_samples(self) -> int:
        """Blocks seen; with none, everything is as slow as the bound allows."""
        return self._latency.num_samples

    @property
    def round_trip_s(self) -> float:
        """Seconds from a step's result to a block behind it, less its draft time. Never negative,
        though a drafter that is told before the router can be ahead of the result."""
        return self._bound_s if not self.num_samples else max(self._offset.mean, 0.0)

    @property
    def deviation_s(self) -> float:
        """Mean deviation of the latency."""
        return self._latency.deviation

    def draft_s(self, num_blocks: int) -> float:
        """Expected seconds in the drafter of a batch of so many blocks, its queue included; 0 for
        none, and before anything is known."""
        if num_blocks < 1 or not self.num_samples:
            return 0.0
        per_block = self._per_block_s()
        fixed = max(self._mean_draft_s - per_block * self._mean_n, 0.0)
        return fixed + per_block * num_blocks

    def hopeful_draft_s(self, num_blocks_N: F64) -> F64:
        """`draft_s` of these numbers of blocks, 1 or more; while all batches were of one size,
        smaller ones count as taking proportionally less: the way to find out is to try."""
        fixed_s = max(self._mean_draft_s - self._per_block_s() * self._mean_n, 0.0)
        seconds_N: F64 = fixed_s + self._per_block_s() * num_blocks_N
        if self._slope_s is None and self._mean_n:
            share_N = np.minimum(num_blocks_N / self._mean_n, 1.0)
            seconds_N = np.minimum(seconds_N, self._mean_draft_s * share_N)
        return seconds_N

    def latency_s(self, num_blocks: int) -> float:
        """Expected seconds from a step's result to the blocks of a batch of so many."""
        if not self.num_samples:
            return self._bound_s
        return max(self.draft_s(num_blocks) + self._offset.mean, 0.0)

    def _fearful_latency_s(self, num_blocks: int) -> float:
        """`latency_s`; while all batches were of one size, larger ones count as taking
        proportionally more: a block that is not waited for is lost, and its cost is not."""
        more = num_blocks / self._mean_n - 1 if self._mean_n else 0.0
        unknown = self._slope_s is None
        return self.latency_s(num_blocks) + (self._mean_draft_s * max(more, 0.0) if unknown else 0)

    def wait_s(self, num_blocks: int = 0) -> float:
        """How long to wait for a block: expected latency plus four deviations, as TCP does.

        It is 0, do not wait at all, while the drafter is known to be slower than the bound or has
        answered nothing of a few batches. Requests keep asking such a drafter, so the first block
        that comes, however late, sets it right again.

        Args:
            num_blocks: of the batch that was asked for; 0: as many as lately.
        """
        if self._waits is None or self._waits[0] != num_blocks:
            self._waits = num_blocks, self._wait_s(num_blocks)
        return self._waits[1]

    def _wait_s(self, num_blocks: int) -> float:
        mean_s = self._latency.mean if self.num_samples else self._bound_s
        if self._num_missed >= _MISSES_TO_GIVE_UP or mean_s > self._bound_s:
            return 0.0
        if not self.num_samples:
            return self._bound_s
        expected_s = max(mean_s, self._fearful_latency_s(num_blocks) if num_blocks else 0.0)
        margin_s = max(4 * self._latency.deviation, expected_s, _LEAST_MARGIN_S)
        return min(expected_s + margin_s, self._bound_s)

    def observe(
        self,
        num_blocks: int,
        draft_s: float,
        latency_s: float,
        *,
        weight: float = 1.0,
        usual: bool = True,
        times: int = 1,
    ) -> None:
        """A block came, in time or late.

        Args:
            num_blocks: in the batch that it was drafted in.
            draft_s: that the drafter reports for the batch; 0 if it does not say.
            latency_s: since the result that asked for it.
            weight: in the fit of the draft time, of which all blocks of a batch say the same.
            usual: false for a drafter that had to catch up before: that says that it is there, and
                how long it takes only if nothing else does.
            times: so many blocks say the very same, one after another.
        """
        self._num_missed = 0
        self._waits = None
        num_blocks, draft_s, waited_s = max(num_blocks, 1), max(draft_s, 0.0), max(latency_s, 0.0)
        for _ in range(times):
            if not usual and self.num_samples:
                return
            self._latency.observe(waited_s)
            self._learn_draft(num_blocks, draft_s, weight)
            self._offset.observe(latency_s - self.draft_s(num_blocks))

    def miss(self, asked: float) -> None:
        """A block that was asked for then did not come in time. The blocks of one batch are asked
        for at one time, and miss it together: they count once."""
        if asked > self._missed_at:
            self._missed_at = asked
            self._num_missed += 1
            self._waits = None

    def snapshot(self) -> dict[str, float]:
        """Flat, for metrics and pictures."""
        return {
            "num_samples": float(self.num_samples),
            "draft_s": self.draft_s(1),
            "draft_per_block_s": self._per_block_s(),
            "round_trip_s": self.round_trip_s,
            "deviation_s": self.deviation_s,
            "wait_s": self.wait_s(),
        }

    def _learn_draft(self, num_blocks: int, draft_s: float, weight: float) -> None:
        draft = self._draft
        draft.num_samples += 1
        if draft.num_samples == 1:
            self._mean_n, self._mean_draft_s = float(num_blocks), draft_s
            draft.deviation = draft_s / 2
            return
        off_n, mean_s, seen_s = num_blocks - self._mean_n, self._mean_draft_s, draft_s
        if off_n * off_n < _FAR_OFF * max(self._spread_n, 1.0):
            predicted_s = mean_s + self._per_block_s() * off_n
            seen_s = predicted_s + draft.clipped(draft_s - predicted_s, predicted_s)
        # Else a size unlike those before, of which the line so far knows nothing: it is believed.
        gain = weight * max(_FORGET, 1 / draft.num_samples)
        off_s = seen_s - mean_s
        self._mean_n += gain * off_n
        self._mean_draft_s = mean_s + gain * off_s
        self._spread_n = (1 - gain) * (self._spread_n + gain * off_n * off_n)
        self._slope_sum = (1 - gain) * (self._slope_sum + gain * off_n * off_s)
        if self._spread_n >= _LEAST_SPREAD:
            self._slope_s = max(self._slope_sum / self._spread_n, 0.0)

    def _per_block_s(self) -> float:
        """Never negative, and never so steep that no blocks would take less than no time."""
        if self._slope_s is None:
            return 0.0
        return min(self._slope_s, self._mean_draft_s / self._mean_n)
