"""Rolling digest of a committed prefix: a few bytes that make silent divergence loud.

``d_0 = SEED; d_{i+1} = ((d_i XOR (id_i + 1)) * PRIME) mod 2**64`` (an FNV-1a walk over whole
ids). Not a security boundary: peers are authenticated, this catches faults.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

SEED: Final = 0xCBF29CE484222325
_PRIME: Final = 0x100000001B3
_PRIME_WORD: Final = np.uint64(_PRIME)
_MASK: Final = (1 << 64) - 1


def extend(digest: int, ids: Iterable[int]) -> int:
    """Digest of the prefix behind ``digest`` followed by ``ids``."""
    for token in map(int, ids):
        digest = ((digest ^ (token + 1)) * _PRIME) & _MASK
    return digest


def of(ids: Iterable[int]) -> int:
    """Digest of a whole prefix, starting at position 0."""
    return extend(SEED, ids)


def extend_rows(digest_R: U64, ids_RN: NDArray[np.int64], num_R: NDArray[np.int64]) -> U64:
    """Digests of many prefixes, each followed by the first ``num_R`` ids of its row."""
    extended_R = digest_R.copy()
    words_NR = (ids_RN.T + 1).astype(np.uint64)
    for n in range(int(num_R.max(initial=0))):
        longer_R = extended_R ^ words_NR[n]
        longer_R *= _PRIME_WORD
        np.copyto(extended_R, longer_R, where=n < num_R)
    return extended_R
