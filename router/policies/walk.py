"""The walk over the drafts of a step in falling order of what they are expected to add.

Survival does not rise along a block, so every start of the walk is a prefix of every block. Ties go
to the lower row, then to the lower position: an order that no drawn value influences, as long as
the order of the rows does not depend on drawn values either.

See `router.policies.policy` for the shape legend.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]


def falling(gain_RG: F32) -> F32:
    """Gains [N] over 0 in walk order."""
    rising = np.sort(gain_RG, axis=None)
    return rising[rising.searchsorted(0.0, side="right") :][::-1]


def rates(gains_N: F32, weight: float, step_s_B: F64, base: int) -> F64:
    """Expected weighted tokens per second after 0, 1, ... drafts of the walk, as far as they fit.

    Args:
        gains_N: in walk order.
        weight: of all requests together, for each emits one token anyhow.
        step_s_B: seconds of a step of B tokens.
        base: tokens of the step without drafts.
    """
    step_s = step_s_B[base : base + len(gains_N) + 1]
    tokens = np.empty(len(step_s))
    tokens[0] = weight
    np.cumsum(gains_N[: len(step_s) - 1], dtype=np.float64, out=tokens[1:])
    tokens[1:] += weight
    tokens /= step_s
    return tokens


def admit(gain_RG: F32, gains_N: F32, num: int) -> I32:
    """Lengths [R] of the first ``num`` drafts of the walk, or of all that gain anything.

    Args:
        gains_N: `falling` of the gains.
    """
    num = min(num, len(gains_N))
    if num == 0:
        return np.zeros(len(gain_RG), np.int32)
    return _down_to(gain_RG, gains_N[num - 1], num)


def first(gain_RG: F32, num: int) -> I32:
    """The same, for who has not sorted the gains: finding one of them takes a third of the time."""
    num = min(num, int(np.count_nonzero(gain_RG)))
    if num == 0:
        return np.zeros(len(gain_RG), np.int32)
    return _down_to(gain_RG, np.partition(gain_RG, -num, axis=None)[-num], num)


def level(limit_R: I64, room: int) -> I32:
    """Lengths [R] up to each row's limit, cut to the room: all rows' first drafts, then all rows'
    second ones, and so on, the lower row first. Survival plays no part."""
    lengths_R: I32 = limit_R.astype(np.int32)
    if int(lengths_R.sum()) <= room:
        return lengths_R
    wants_RG = np.arange(lengths_R.max()) < lengths_R[:, None]
    depth = int(np.searchsorted(wants_RG.sum(axis=0).cumsum(), room, side="right"))
    lengths_R = np.minimum(lengths_R, depth)
    lengths_R[np.flatnonzero(limit_R > depth)[: room - int(lengths_R.sum())]] += 1
    return lengths_R


def _down_to(gain_RG: F32, least: np.float32, num: int) -> I32:
    """Lengths [R] of the first ``num`` drafts of the walk, the last of which gains ``least``."""
    lengths_R: I32 = np.count_nonzero(gain_RG > least, axis=1).astype(np.int32)
    num_tied = num - int(lengths_R.sum())
    tied = np.flatnonzero(gain_RG == least)[:num_tied] // gain_RG.shape[1]
    lengths_R += np.bincount(tied, minlength=len(gain_RG)).astype(np.int32)
    return lengths_R
