"""`SparseQ`: the draft law of a block in rejection mode, sparse and exact (DESIGN 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cluster.errors import FrameError
from cluster.wire import F32, I32

SUM_TOLERANCE: Final = 1e-3


@dataclass(frozen=True, kw_only=True, eq=False)
class SparseQ:
    """The numbers that draft tokens were really drawn from, one row per token; absent means zero.

    Both sides divide a row by its fp64 sum, so fp32 rounding of the sum is no error of the law.
    """

    ids: I32
    """[n, K], unique in each row."""
    probs: F32
    """[n, K]."""


def check_draft(draft_ids: Sequence[int], q: SparseQ | None, vocab_size: int) -> None:
    """Refuse a draft block that cannot be verified.

    Raises:
        FrameError: an id outside the vocabulary; a q of another length than the block, with
            repeated ids, negative probabilities, a sum off one, or no mass on the drawn token.
    """
    drafts = np.asarray(draft_ids, np.int64)
    if drafts.size and not (drafts.min() >= 0 and drafts.max() < vocab_size):
        raise FrameError(f"draft ids outside the vocabulary of {vocab_size}")
    if q is None:
        return
    num = len(drafts)
    if q.ids.shape != q.probs.shape or q.ids.ndim != 2 or len(q.ids) != num:
        raise FrameError(f"q of shapes {q.ids.shape}, {q.probs.shape} for {num} draft tokens")
    if num == 0:
        return
    if q.ids.shape[1] == 0 or not (q.ids.min() >= 0 and q.ids.max() < vocab_size):
        raise FrameError(f"q ids missing or outside the vocabulary of {vocab_size}")
    ordered = np.sort(q.ids, axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise FrameError("q repeats an id")
    sums = q.probs.sum(axis=1, dtype=np.float64)
    if not (q.probs >= 0).all() or not (np.abs(sums - 1) <= SUM_TOLERANCE).all():
        raise FrameError(f"q is no distribution: row sums {sums.min()}..{sums.max()}")
    if not ((q.ids == drafts[:, None]) & (q.probs > 0)).any(axis=1).all():
        raise FrameError("a draft token has no mass in its q: it was not drawn from it")
