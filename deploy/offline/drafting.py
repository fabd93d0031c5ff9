"""The drafter's half of a round without streams: what the verifier node and the drafter node do.

Committed rows of a step become `Open`, `Commit` and `Release` frames as
`verifier_service.draft_links` builds them, `Drafter.run` answers them, and its `Blocks` are read
with the router's own checks. There is one copy of each frame, and none is serialised.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cluster.wire import Commit, Open, Release, Sampling
from drafter_service.drafter import Drafter, Work
from drafter_service.frame_checks import check_commit, check_open
from drafter_service.replies import blocks_by_lane
from router.blocks import DraftBlock, Malformed, read_blocks
from verifier_service.engine import CommittedRows
from verifier_service.feature_cache import features_to_wire

_LANE: Final = "offline"
_OWNER: Final = 1
_EPOCH: Final = 0


@dataclass(frozen=True, kw_only=True)
class OfflineBlock:
    """A block in hand, and in what company it was drafted."""

    block: DraftBlock
    draft_batch: int
    """Blocks drafted in the same batch, this one included."""


class DraftingHalf:
    """Feeds one drafter and collects its blocks.

    Args:
        vocab_size: of the target, to check blocks against.
    """

    def __init__(self, drafter: Drafter, *, vocab_size: int) -> None:
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._pending: list[Work] = []
        self._bound: set[int] = set()
        self.blocks: dict[int, OfflineBlock] = {}
        """By request, for its present anchor."""
        self.num_lost = 0
        """Sessions that the drafter could not keep, or that it answered with a malformed block."""

    def open(self, rid: int, first_id: int, sampling: Sampling) -> None:
        """Start a session; its rows follow by `feed`."""
        frame = Open(lane_id=_LANE, rid=rid, epoch=_EPOCH, first_id=first_id, sampling=sampling)
        check_open(frame, self._drafter.limits)
        self._pending.append(Work(owner=_OWNER, frame=frame))
        self._bound.add(rid)

    def feed(
        self,
        committed: Sequence[CommittedRows],
        *,
        wanted: Collection[int],
        draft_batch: int | None = None,
    ) -> None:
        """Tell the sessions what a step committed and take the blocks they answer with.

        Args:
            committed: of `StepOutcome`.
            wanted: requests whose next round can use a block.
            draft_batch: most blocks drafted at once, None for all.
        """
        for one in committed:
            self.blocks.pop(one.rid, None)
        rows = [one for one in committed if one.rid in self._bound and not one.finished]
        self.release([one.rid for one in committed if one.finished])
        for group in _groups(rows, wanted, draft_batch):
            frame = _commit_frame(group, wanted)
            check_commit(frame, self._drafter.limits)
            self._run([Work(owner=_OWNER, frame=frame)])

    def release(self, rids: Collection[int]) -> None:
        """Drop sessions, with the next batch; unknown ones are ignored."""
        known = sorted(self._bound & set(rids))
        if known:
            frame = Release(lane_id=_LANE, rid=np.array(known, np.int64))
            self._pending.append(Work(owner=_OWNER, frame=frame))
            self._bound -= set(known)

    def close(self) -> None:
        """Drop every session now."""
        self.release(tuple(self._bound))
        self._run([])

    def _run(self, work: list[Work]) -> None:
        pending, self._pending = self._pending, []
        outcome = self._drafter.run([*pending, *work], time.monotonic())
        for lost in outcome.lost:
            self._lose(lost.rid)
        for _, frame in blocks_by_lane(outcome, drafter_id=_LANE, draft_s=0.0):
            for block in read_blocks(frame, vocab_size=self._vocab_size):
                if isinstance(block, Malformed):
                    self._lose(block.rid)
                    continue
                self.blocks[block.rid] = OfflineBlock(block=block, draft_batch=len(outcome.drafted))

    def _lose(self, rid: int) -> None:
        """The request goes plain from here on: nobody else could draft for it."""
        if rid in self._bound:
            self.num_lost += 1
            self.release([rid])


def _groups(
    rows: Sequence[CommittedRows], wanted: Collection[int], draft_batch: int | None
) -> Iterator[list[CommittedRows]]:
    """Batches of at most ``draft_batch`` wanted blocks; rows that ask for none join the first."""
    asking = [one for one in rows if one.rid in wanted]
    silent = [one for one in rows if one.rid not in wanted]
    size = draft_batch or max(len(asking), 1)
    batches = [asking[i : i + size] for i in range(0, len(asking), size)] or [[]]
    batches[0] = silent + batches[0]
    yield from (batch for batch in batches if batch)


def _commit_frame(rows: Sequence[CommittedRows], wanted: Collection[int]) -> Commit:
    features = [features_to_wire(one.features) for one in rows]
    return Commit(
        lane_id=_LANE,
        rid=np.array([one.rid for one in rows], np.int64),
        epoch=np.full(len(rows), _EPOCH, np.int32),
        first_position=np.array([one.first_position for one in rows], np.int32),
        num_rows=np.array([len(one.ids) for one in rows], np.int32),
        digest=np.array([one.digest for one in rows], np.uint64),
        want_draft=np.array([one.rid in wanted for one in rows], np.uint8),
        ids=np.array([token for one in rows for token in one.ids], np.int32),
        features=np.concatenate(features),
    )
