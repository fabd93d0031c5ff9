"""Rolling digest of a committed prefix: a few bytes that make silent divergence loud.

``d_0 = SEED; d_{i+1} = ((d_i XOR (id_i + 1)) * PRIME) mod 2**64`` (an FNV-1a walk over whole
ids). Not a security boundary: peers are authenticated, this catches faults.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

SEED: Final = 0xCBF29CE484222325
_PRIME: Final = 0x100000001B3
_MASK: Final = (1 << 64) - 1


def extend(digest: int, ids: Iterable[int]) -> int:
    """Digest of the prefix behind ``digest`` followed by ``ids``."""
    for token in ids:
        digest = ((digest ^ (int(token) + 1)) * _PRIME) & _MASK
    return digest


def of(ids: Iterable[int]) -> int:
    """Digest of a whole prefix, starting at position 0."""
    return extend(SEED, ids)
