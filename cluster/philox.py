"""Philox4x32-10, a counter-based generator: random numbers as a pure function of their name.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). There is no
state to keep, ship or lose: any member that knows key and counter forms the same number, and a
repeated round draws what it drew before. Checked against the published known-answer vectors.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
F64 = NDArray[np.float64]

_ROUNDS: Final = 10
_MULTIPLIERS: Final = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
_WEYL: Final = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)
_LOW: Final = np.uint64(0xFFFFFFFF)
_32: Final = np.uint64(32)


def philox4x32(counter: U64, key: U64) -> U64:
    """Ten rounds over a batch.

    Args:
        counter: [4, ...] words below 2**32.
        key: [2, ...] words below 2**32; broadcasts against the counter's trailing axes.

    Returns:
        [4, ...] words below 2**32 (held as uint64, the width the products need).
    """
    batch = np.broadcast_shapes(counter.shape[1:], key.shape[1:])
    counter = counter.reshape(4, *([1] * (len(batch) + 1 - counter.ndim)), *counter.shape[1:])
    key = key.reshape(2, *([1] * (len(batch) + 1 - key.ndim)), *key.shape[1:])
    column = (2, *([1] * len(batch)))
    multipliers, weyl = _MULTIPLIERS.reshape(column), _WEYL.reshape(column)
    even, odd = counter[0::2], counter[1::2]  # words (0, 2) are multiplied, (1, 3) mixed in
    for round_key in _round_keys(key, weyl):
        product = even * multipliers
        even = (product >> _32)[::-1] ^ odd ^ round_key
        product &= _LOW
        odd = product[::-1]
    words = np.empty((4, *batch), np.uint64)
    words[0::2], words[1::2] = even, odd
    return words


def _round_keys(key: U64, weyl: U64) -> U64:
    """[rounds, 2, ...]"""
    turns = np.arange(_ROUNDS, dtype=np.uint64).reshape(-1, *([1] * key.ndim))
    keys: U64 = key + turns * weyl
    keys &= _LOW
    return keys


def uniforms(words: U64) -> F64:
    """Uniforms strictly inside (0, 1) from the first two words of each block, [4, ...] -> [...].

    The values are the odd multiples of 2**-53, equally likely. The ends are out of reach, so
    that logarithms are finite and an event of probability 0 or 1 is decided for certain.
    """
    bits = (words[0] << np.uint64(21)) | (words[1] >> np.uint64(11)) | np.uint64(1)
    values: F64 = bits * 2.0**-53
    return values
