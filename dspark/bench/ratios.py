"""Paired ratios over repeats, with a lower bound. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

_T90: Final = (
    3.0777, 1.8856, 1.6377, 1.5332, 1.4759, 1.4398, 1.4149, 1.3968, 1.3830, 1.3722, 1.3634, 1.3562,
    1.3502, 1.3450, 1.3406, 1.3368, 1.3334, 1.3304, 1.3277, 1.3253, 1.3232, 1.3212, 1.3195, 1.3178,
    1.3163, 1.3150, 1.3137, 1.3125, 1.3114, 1.3104,
)  # fmt: skip
"""90% points of Student's t with 1, 2, ... degrees of freedom."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """One side over the other, from pairs that were measured next to each other."""

    ratio: float
    """Geometric mean over the pairs."""
    lower: float | None
    """The true ratio is above it with 90% confidence, one-sided; None with a single pair."""
    pairs: int


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Ratio of two sides, pair by pair.

    The logarithms of the pairs' ratios are taken for normal, so that a bound follows from Student's
    t: with the handful of repeats that a benchmark has, a bootstrap would promise too much.

    Args:
        ours, theirs: positive values; those of equal place are a pair.
    """
    logs = np.log(np.array(ours, float)) - np.log(np.array(theirs, float))
    mean = float(logs.mean())
    lower = None
    if len(logs) > 1:
        t = _T90[min(len(logs) - 1, len(_T90)) - 1]
        lower = math.exp(mean - t * float(logs.std(ddof=1)) / math.sqrt(len(logs)))
    return Ratio(ratio=math.exp(mean), lower=lower, pairs=len(logs))
