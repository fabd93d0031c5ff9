"""The texts that simulated targets write: one token for each (request, position), whoever asks.

As with the real pools in coupled mode, the text depends on neither drafts, schedule nor faults, so
that a token lost or doubled anywhere shows.

Shape legend: S requests, N positions of each.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from deploy.simulation.keyed import U64, words

I64 = NDArray[np.int64]

VOCAB_SIZE: Final = 32_000
_TOKEN: Final = 16


def tokens(key_S: U64, position_SN: U64) -> I64:
    """Token ids [S, N] at these positions."""
    return (words(key_S[:, None], position_SN, _TOKEN) % np.uint64(VOCAB_SIZE)).astype(np.int64)


def text(key: int, first: int, last: int) -> list[int]:
    """Token ids at positions first .. last - 1 of one request."""
    positions = np.arange(first, last, dtype=np.uint64)
    ids: list[int] = tokens(np.array([key], np.uint64), positions[None, :])[0].tolist()
    return ids


def other(token: I64) -> I64:
    """Ids that are not these."""
    return (token + 1) % VOCAB_SIZE
