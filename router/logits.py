"""Probabilities as logits, and back, for small arrays that every round maps. Pure."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

_EPS: Final = 1e-3
"""Probabilities count as inside [eps, 1 - eps]: past that they make no difference to a schedule."""
MAX_LOGIT: Final = float(np.log((1 - _EPS) / _EPS))


def logit(probability: F64) -> F64:
    """Of each, within `MAX_LOGIT` of 0."""
    inside = within(probability, _EPS, 1 - _EPS)
    found: F64 = np.log(inside / (1 - inside))
    return found


def sigmoid(value: F64) -> F64:
    """Its inverse."""
    probability: F64 = 1 / (1 + np.exp(-value))
    return probability


def within(values: F64, low: float, high: float) -> F64:
    """`numpy.clip`, which costs small arrays twice as much."""
    inside: F64 = np.minimum(np.maximum(values, low), high)
    return inside
