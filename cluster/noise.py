"""The one place that draws random numbers (DESIGN 3.8 and 3.11).

Every number has a name: request seed, stream, position, index. Streams never share numbers: a
draft drawn from the noise that later decides its acceptance biases the output.

| stream | position | index | used for |
|---|---|---|---|
| ``DRAFT`` | anchor | k | rejection mode: the k-th draft token |
| ``ACCEPT`` | anchor | k | rejection mode: does draft k survive |
| ``RESIDUAL`` | anchor | k | rejection mode: the token in place of a refused draft k |
| ``BONUS`` | anchor | k | rejection mode: the token after k - 1 survivors |
| ``GUMBEL`` | of the chosen token | token id | coupled mode: perturbs log p and log q alike |
| ``REST`` | of the chosen token | 0 | coupled mode: perturbs the mass outside the candidates |
| ``REST_DRAW`` | of the chosen token | 0 | coupled mode: which token of that mass |
| ``EXPLORE`` | anchor | 0 | router: is the row verified whole (seed: request id) |
| ``GATE`` | anchor | 0 | router: is a draft asked for, or not, to learn (seed: request id) |

Rejection mode names numbers by anchor, because a position can be drafted again in a later round
and must then not see a number that an earlier round has already acted upon. Coupled mode names
them by the position itself: that the noise is the same in every round is its whole point.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cluster.philox import philox4x32, uniforms

F64 = NDArray[np.float64]

_LOW: Final = np.uint64(0xFFFFFFFF)
_32: Final = np.uint64(32)


class Stream(IntEnum):
    """What a number is for; part of its name on every member, so values never change."""

    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    BONUS = 4
    GUMBEL = 5
    REST = 6
    REST_DRAW = 7
    EXPLORE = 8
    GATE = 9


class Randomness(Protocol):
    """Where uniforms come from. Tests put enumerated values behind the production functions."""

    def uniform(
        self, stream: Stream, seeds: NDArray[np.uint64], positions: ArrayLike, indices: ArrayLike
    ) -> F64:
        """Uniforms strictly inside (0, 1), in the broadcast shape of the three arrays."""
        ...


class KeyedRandomness:
    """Philox keyed by the request seed, counting (position, index, stream)."""

    def uniform(
        self, stream: Stream, seeds: NDArray[np.uint64], positions: ArrayLike, indices: ArrayLike
    ) -> F64:
        """See `Randomness`. Positions and indices are below 2**32, seeds below 2**64."""
        positions_, indices_ = _words(positions), _words(indices)
        shape = np.broadcast_shapes(positions_.shape, indices_.shape)
        counter = np.zeros((4, *shape), np.uint64)
        counter[0], counter[1], counter[2] = positions_, indices_, int(stream)
        key = np.array([seeds & _LOW, seeds >> _32])
        return uniforms(philox4x32(counter, key))


KEYED: Final = KeyedRandomness()


def gumbel(uniform: F64) -> F64:
    """Standard Gumbel noise from uniforms: ``argmax(log p + gumbel)`` is a draw from p."""
    noise: F64 = -np.log(-np.log(uniform))
    return noise


def _words(values: ArrayLike) -> NDArray[Any]:
    return np.asarray(values).astype(np.uint64, copy=False)
