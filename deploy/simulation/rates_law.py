"""Laws of the number of requests in a pool, summed up. Pure.

Shape legend: n numbers of requests, M values that are equally likely at each.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
Percentiles = tuple[float, float, float]

_MOST_BINS: Final = 1024
_LEAST: Final = 1e-300


def coarse(law: F64) -> tuple[F64, F64]:
    """Numbers of requests and their weights, in at most `_MOST_BINS` bins, or a few more."""
    n = np.arange(len(law), dtype=np.float64)
    there = law > _LEAST
    if there.sum() <= _MOST_BINS:
        return n[there], law[there]
    starts = np.arange(0, len(law), -(-len(law) // _MOST_BINS))
    weight: F64 = np.add.reduceat(law, starts)
    mean = np.add.reduceat(law * n, starts) / np.maximum(weight, _LEAST)
    return np.where(weight > _LEAST, mean, n[starts]), weight


def percentiles(value_nM: F64, weight_n: F64, shares: Percentiles) -> Percentiles:
    """Of values that are equally likely within a row."""
    weight = np.repeat(weight_n, value_nM.shape[1])
    order = np.argsort(value_nM, axis=None)
    cumulated = weight[order].cumsum()
    at = np.searchsorted(cumulated, np.array(shares) / 100 * cumulated[-1])
    low, middle, high = value_nM.ravel()[order][at.clip(0, len(order) - 1)].tolist()
    return low, middle, high
