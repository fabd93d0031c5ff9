"""Where cutting blocks begins to pay: above the knee of the step times, not below it."""

from __future__ import annotations

from typing import Final

import numpy as np

from router.policies.policy import PolicyInput

_FORGET: Final = 1 / 16
"""Weight of the newest step in a running mean."""
_MOST_GAIN: Final = 1.0
"""A step counts as at most this gain, so that a mean comes down again as fast as it went up."""
_LOADS: Final = 64


class Knee:
    """Running mean of what the best cut of a step's blocks would have gained over verifying them
    whole, for each class of load by itself: number of requests in powers of two, with and without
    prompt chunks. A load that swings around the knee thus meets, each time, what was learnt there;
    nothing has to be learnt anew, and nothing carries over.

    Cutting starts at the minimum gain and ends at half of it: what is between does not make it
    flicker, and what is given up by not cutting is never more than the minimum gain.

    Args:
        min_gain: share of tokens per second; 0 for always cutting.
    """

    def __init__(self, min_gain: float) -> None:
        self._min_gain = min_gain
        self._gain_L = np.full(_LOADS, np.nan)
        self._cuts_L = np.ones(_LOADS, np.bool_)
        """A load not met before is cut for: that is right wherever the step times are."""

    def cuts(self, step: PolicyInput) -> bool:
        """Whether the blocks of this step are worth cutting. Its survival values are not read."""
        return bool(self._cuts_L[_load(step)])

    def learn(self, step: PolicyInput) -> None:
        """Take in what cutting would have gained in a step that is over."""
        gain = cutting_gain(step)
        if gain is None:
            return
        load = _load(step)
        before = float(self._gain_L[load])
        mean = gain if np.isnan(before) else before + _FORGET * (gain - before)
        self._gain_L[load] = mean
        bar = self._min_gain / 2 if self._cuts_L[load] else self._min_gain
        self._cuts_L[load] = mean >= bar


def cutting_gain(step: PolicyInput) -> float | None:
    """Share of expected tokens per second that the best point of the walk has over whole blocks, at
    most `_MOST_GAIN`; None where there is nothing to cut or where whole blocks do not fit."""
    num_drafts = int(step.num_drafts_R.sum())
    if not 0 < num_drafts <= step.room:
        return None
    best = float(step.walk_rates.max())
    whole_tokens = step.weight + float(step.falling.sum(dtype=np.float64))
    whole = whole_tokens / float(step.step_s_B[step.base + num_drafts])
    return min(best / whole - 1.0, _MOST_GAIN)


def _load(step: PolicyInput) -> int:
    """Class of load."""
    return min(2 * len(step.rids).bit_length() + (step.num_fixed_tokens > 0), _LOADS - 1)
