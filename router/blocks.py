"""Draft blocks as the lane uses them, and the checks that the wire cannot make.

A drafter is not trusted: a block that breaks a rule is no block, and its request is verified with
length 0. (A frame that contradicts itself does not get here: the stream refuses it and ends.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.errors import FrameError
from cluster.sparse import SparseQ, check_draft
from cluster.wire import Blocks

F64 = NDArray[np.float64]


@dataclass(kw_only=True, eq=False)
class DraftBlock:
    """A checked block of one session. Nobody changes it; frozen, it would take three times as long
    to make, and one is made for every row of every round."""

    rid: int
    epoch: int
    anchor: int
    digest: int
    ids: tuple[int, ...]
    """n draft tokens for positions anchor + 1 .. anchor + n, n <= gamma."""
    confidence: F64
    """[n] in [0, 1]: probability that token k survives if all before it do, as reported."""
    q: SparseQ | None
    """[n, K] what the tokens were drawn from; None for one-hot and coupled drafts."""
    batch_size: int = 1
    """Blocks of the frame that brought it."""
    draft_s: float = 0.0
    """Seconds that the drafter spent on the frame, its queue included; 0: it did not say."""


@dataclass(frozen=True, kw_only=True)
class Malformed:
    """A block that broke a rule: its request goes without."""

    rid: int
    epoch: int
    anchor: int
    reason: str
    batch_size: int = 1
    draft_s: float = 0.0


def read_blocks(frame: Blocks, *, vocab_size: int) -> Iterator[DraftBlock | Malformed]:
    """The blocks of a well-formed frame, one by one."""
    q_rows = np.cumsum(frame.has_q != 0) - 1
    batch_size, draft_s = len(frame.rid), max(frame.draft_s, 0.0)
    for s in range(len(frame.rid)):
        rid, epoch, anchor = int(frame.rid[s]), int(frame.epoch[s]), int(frame.anchor[s])
        n = int(frame.num_draft[s])
        ids = tuple(frame.ids[s, :n].tolist())
        q = None
        if frame.has_q[s]:
            at = q_rows[s]
            q = SparseQ(ids=frame.q_ids[at, :n], probs=frame.q_probs[at, :n])
        try:
            if len(ids) < n:
                raise FrameError(f"{n} draft tokens in a block of {len(ids)}")
            check_draft(ids, q, vocab_size)
        except FrameError as error:
            yield Malformed(
                rid=rid,
                epoch=epoch,
                anchor=anchor,
                reason=str(error),
                batch_size=batch_size,
                draft_s=draft_s,
            )
            continue
        yield DraftBlock(
            rid=rid,
            epoch=epoch,
            anchor=anchor,
            digest=int(frame.digest[s]),
            ids=ids,
            confidence=frame.confidence[s, :n].astype(np.float64),
            q=q,
            batch_size=batch_size,
            draft_s=draft_s,
        )
