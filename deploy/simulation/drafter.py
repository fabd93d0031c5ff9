"""A simulated drafter: batches what has come, works for a while, sends blocks to the lanes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

import numpy as np

from cluster.sparse import SparseQ
from deploy.simulation.acceptance import AcceptanceModel
from deploy.simulation.clock import Clock, Device, Link
from deploy.simulation.keyed import F64, U64
from deploy.simulation.specs import DrafterSpec
from deploy.simulation.table import I64
from deploy.simulation.text import other, tokens
from router.blocks import DraftBlock
from router.drafter_book import DrafterRef

FINGERPRINT: Final = "simulated"
_NO_JITTER: Final = 1.0


class BlockTaker(Protocol):
    """A lane, as drafters see it."""

    def take_blocks(self, drafter_id: str, blocks: list[DraftBlock]) -> None:
        """One frame."""
        ...


class Commits(NamedTuple):
    """Sessions of one lane that ask for a block. S of them."""

    lane: BlockTaker
    rid_S: I64
    epoch_S: I64
    anchor_S: I64
    digest_S: U64
    key_S: U64
    traits_SG: F64
    num_rows: int
    """Positions to take in first, over all of them."""
    came_s: float = 0.0

    def part(self, which: slice, *, num_rows: int) -> Commits:
        """Some of the sessions."""
        return self._replace(
            rid_S=self.rid_S[which],
            epoch_S=self.epoch_S[which],
            anchor_S=self.anchor_S[which],
            digest_S=self.digest_S[which],
            key_S=self.key_S[which],
            traits_SG=self.traits_SG[which],
            num_rows=num_rows,
        )


class SimDrafter:
    """One replica. What a lane lost with an incarnation, the next one does not have.

    Args:
        link: to the router.
    """

    def __init__(
        self,
        name: str,
        spec: DrafterSpec,
        *,
        model: AcceptanceModel,
        clock: Clock,
        device: Device,
        link: Link,
        rng: np.random.Generator,
    ) -> None:
        self.ref = DrafterRef(
            drafter_id=name, address=name, fingerprint=FINGERPRINT, device=device.name
        )
        self.incarnation = 0
        self.live = True
        self.device = device
        self.link = link
        self.slowness = 1.0
        self.busy_s = 0.0
        self.num_batches = 0
        self.num_blocks = 0
        self._spec = spec
        self._model = model
        self._clock = clock
        self._rng = rng
        self._waiting: deque[Commits] = deque()
        self._busy = False

    def take(self, incarnation: int, commits: Commits) -> None:
        """Sessions that want a block; the dead and their successors do not know them."""
        if self.live and incarnation == self.incarnation:
            self._waiting.append(commits._replace(came_s=self._clock.now))
            if not self._busy:
                self._begin()

    def die(self) -> None:
        """Lose everything."""
        self.live, self._busy = False, False
        self.incarnation += 1
        self._waiting.clear()
        self.device.cancel(self._finish)

    def revive(self) -> None:
        """Start again, empty."""
        self.live = True

    @property
    def num_waiting(self) -> int:
        """Blocks that wait for a batch."""
        return sum(len(commits.rid_S) for commits in self._waiting)

    def _begin(self) -> None:
        batch, room = [], self._spec.max_batch
        while self._waiting and room:
            commits = self._waiting.popleft()
            if len(commits.rid_S) > room:
                self._waiting.appendleft(commits.part(slice(room, None), num_rows=0))
                commits = commits.part(slice(room), num_rows=commits.num_rows)
            batch.append(commits)
            room -= len(commits.rid_S)
        num_blocks = self._spec.max_batch - room
        self._busy = True
        self.num_batches += 1
        self.num_blocks += num_blocks
        work_s = self._spec.curve.draft_s(num_blocks, sum(commits.num_rows for commits in batch))
        work_s *= self.slowness * jitter(self._rng, self._spec.jitter)
        self.device.run(work_s, self._finish, batch, self._clock.now)

    def _finish(self, batch: list[Commits], began_s: float) -> None:
        self._busy = False
        self.busy_s += self._clock.now - began_s
        for commits in batch:
            draft_s = self._clock.now - commits.came_s
            blocks = self._blocks(commits, draft_s)
            self.link.send(commits.lane.take_blocks, self.ref.drafter_id, blocks)
        if self._waiting:
            self._begin()

    def _blocks(self, commits: Commits, draft_s: float) -> list[DraftBlock]:
        model, size = self._model, len(commits.rid_S)
        right_SG, confidence_SG = model.draft(commits.key_S, commits.anchor_S, commits.traits_SG)
        places_SG = (commits.anchor_S[:, None] + np.arange(1, model.gamma + 1)).astype(np.uint64)
        true_SG = tokens(commits.key_S, places_SG)
        ids_SG = np.where(right_SG, true_SG, other(true_SG))
        q_of = _sparse_q(ids_SG) if model.regime == "rejection" else _no_q
        columns = zip(
            commits.rid_S.tolist(),
            commits.epoch_S.tolist(),
            commits.anchor_S.tolist(),
            commits.digest_S.tolist(),
            ids_SG.tolist(),
            strict=True,
        )
        return [
            DraftBlock(
                rid=rid,
                epoch=epoch,
                anchor=anchor,
                digest=digest,
                ids=tuple(ids),
                confidence=confidence_SG[s],
                q=q_of(s),
                batch_size=size,
                draft_s=draft_s,
            )
            for s, (rid, epoch, anchor, digest, ids) in enumerate(columns)
        ]


def jitter(rng: np.random.Generator, relative: float) -> float:
    """A factor of mean 1."""
    if not relative:
        return _NO_JITTER
    return float(np.exp(relative * rng.standard_normal() - relative**2 / 2))


def _no_q(s: int) -> SparseQ | None:
    return None


def _sparse_q(ids_SG: I64) -> Callable[[int], SparseQ | None]:
    """Laws as narrow as can be: who draws and judges here looks at none."""
    ids_SGK = ids_SG[:, :, None].astype(np.int32)
    probs_GK = np.ones(ids_SGK.shape[1:], np.float32)
    return lambda s: SparseQ(ids=ids_SGK[s], probs=probs_GK)
