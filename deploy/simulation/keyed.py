"""Random numbers by name: what a request meets depends on it and a position, on nothing else.

Two runs under different policies so see the same texts and the same hard places, and differ only
by what the policies do. For realism of a simulation only: served tokens are drawn by
`cluster.noise`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
U64 = NDArray[np.uint64]
Words = U64 | np.uint64

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MASK: Final = (1 << 64) - 1
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = (np.uint64(shift) for shift in (30, 27, 31))
_HALF: Final = np.uint64(32)
_LOW: Final = np.uint64(0xFFFFFFFF)
_UNIT: Final = 2.0**-53
_UNIT_HALF: Final = 2.0**-32


def words(key: U64, index: Words, purpose: int) -> U64:
    """64 random bits for each name, in the broadcast shape (splitmix64, twice over)."""
    salt = np.uint64(purpose * int(_GOLDEN) & _MASK)
    return _mixed(_mixed(key + salt) + index * _GOLDEN)


def uniforms(key: U64, index: Words, purpose: int) -> F64:
    """Uniform in (0, 1)."""
    high = words(key, index, purpose) >> np.uint64(11)
    drawn: F64 = (high.astype(np.float64) + 0.5) * _UNIT
    return drawn


def normals(key: U64, index: Words, purpose: int) -> F64:
    """Standard normal (Box and Muller's, one of the pair)."""
    bits = words(key, index, purpose)
    first: F64 = ((bits >> _HALF).astype(np.float64) + 0.5) * _UNIT_HALF
    second: F64 = (bits & _LOW).astype(np.float64) * _UNIT_HALF
    drawn: F64 = np.sqrt(-2.0 * np.log(first)) * np.cos(2 * np.pi * second)
    return drawn


def _mixed(bits: U64) -> U64:
    mixed: U64 = bits ^ (bits >> _S30)
    mixed *= _MIX_1
    mixed ^= mixed >> _S27
    mixed *= _MIX_2
    mixed ^= mixed >> _S31
    return mixed
