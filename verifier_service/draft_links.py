"""Draft sessions of live requests, and the links they are fed through.

Everything here is synchronous and bounded: a step hands its commits over and goes on. A session
whose frames cannot be delivered (no room, drafter dead, drafter lost it) is *unbound*: reported to
the router once, in the next `StepResult`, which then decodes plainly or binds it elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cluster import digest
from cluster.streams import StreamCounters
from cluster.wire import MAX_COMMIT_BYTES, Commit, Hello, Lost, Open, Release, Sampling
from verifier_service.draft_link import DraftLink
from verifier_service.feature_cache import Chunk

_MAX_LINKS: Final = 256
_REDIAL_S: Final = 1.0
"""A drafter that just failed is not dialled again for this long."""
_HEAD_BYTES: Final = 512
"""About what a frame takes beside its arrays."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """What a session shall be told: rows, the digest behind them, and whether to draft."""

    rid: int
    chunk: Chunk
    digest: int
    """Of all committed ids up to and including the chunk's last."""
    want_draft: bool


@dataclass(kw_only=True)
class LinkCounters:
    """Totals over all links."""

    opened: int = 0
    commit_frames: int = 0
    committed_rows: int = 0
    overflowed: int = 0
    """Sessions unbound because a queue was full."""
    lost: int = 0
    """Sessions that drafters said they had lost."""
    links_failed: int = 0


@dataclass(kw_only=True)
class _Session:
    rid: int
    lane_id: str
    epoch: int
    link: DraftLink
    num_rows: int = 0
    """Rows told so far: the next one has this position."""
    digest: int
    """Of the ids told so far."""


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """A part of one session's chunk that travels in one frame."""

    session: _Session
    chunk: Chunk
    start: int
    end: int
    digest: int
    want_draft: bool


class DraftLinks:
    """One link per drafter, one session at most per request.

    Args:
        hello: of the verifier that dials.
        queue_bytes: bound of each link's queue. A session longer than it cannot be rebound.
    """

    def __init__(
        self,
        *,
        hello: Hello,
        queue_bytes: int,
        connect_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = LinkCounters()
        self.stream_counters = StreamCounters()
        self._hello = hello
        self._queue_bytes = queue_bytes
        self._connect_timeout_s = connect_timeout_s
        self._clock = clock
        self._links: dict[str, DraftLink] = {}
        self._redial_at_s: dict[str, float] = {}
        self._sessions: dict[int, _Session] = {}
        self._unbound: set[int] = set()

    def bound(self, rid: int) -> bool:
        """Whether the request has a session that is being fed."""
        return rid in self._sessions

    @property
    def queued_bytes(self) -> int:
        """Bytes waiting over all links."""
        return sum(link.queued_bytes for link in self._links.values())

    def take_unbound(self) -> frozenset[int]:
        """Requests unbound since the last call."""
        unbound, self._unbound = frozenset(self._unbound), set()
        return unbound

    def unbind(self, rid: int) -> None:
        """Give a session up, telling its drafter and (by `take_unbound`) its router."""
        session = self._sessions.pop(rid, None)
        if session is not None:
            self._post_release(session.link, session.lane_id, [rid])
        self._unbound.add(rid)

    def open(
        self,
        *,
        rid: int,
        lane_id: str,
        epoch: int,
        drafter_id: str,
        address: str,
        first_id: int,
        sampling: Sampling,
    ) -> None:
        """Bind a request to a drafter, in place of any other; unbound at once if that cannot be."""
        self.release([rid])
        link = self._link(drafter_id, address)
        frame = Open(lane_id=lane_id, rid=rid, epoch=epoch, first_id=first_id, sampling=sampling)
        num_bytes = _HEAD_BYTES + 8 * len(sampling.bias_ids)
        if link is None or not link.post(frame, num_bytes):
            self._unbound.add(rid)
            return
        self._unbound.discard(rid)
        self.counters.opened += 1
        self._sessions[rid] = _Session(
            rid=rid, lane_id=lane_id, epoch=epoch, link=link, digest=digest.of([first_id])
        )

    def commit(self, updates: Iterable[Update]) -> None:
        """Tell sessions their new rows: per drafter as few frames as `MAX_COMMIT_BYTES` allows.

        Updates of requests without a session are skipped. Several updates of one request must
        come in order.
        """
        by_link: dict[tuple[DraftLink, str], list[Update]] = {}
        for update in updates:
            session = self._sessions.get(update.rid)
            if session is not None:
                by_link.setdefault((session.link, session.lane_id), []).append(update)
        for (link, lane_id), group in by_link.items():
            for pieces in _pack(self._cut(group)):
                self._post_commit(link, lane_id, pieces)

    def release(self, rids: Iterable[int]) -> None:
        """Drop sessions on purpose, wherever they are; unknown ones are ignored."""
        by_link: dict[tuple[DraftLink, str], list[int]] = {}
        for rid in rids:
            self._unbound.discard(rid)
            session = self._sessions.pop(rid, None)
            if session is not None:
                by_link.setdefault((session.link, session.lane_id), []).append(rid)
        for (link, lane_id), group in by_link.items():
            self._post_release(link, lane_id, group)

    def release_all(self) -> None:
        """Drop every session (the lease is gone)."""
        self.release(tuple(self._sessions))
        self._unbound.clear()

    async def close(self) -> None:
        """End all links."""
        links, self._links = tuple(self._links.values()), {}
        self._sessions.clear()
        await asyncio.gather(*(link.close() for link in links))

    def _link(self, drafter_id: str, address: str) -> DraftLink | None:
        """The link to a drafter, dialled if need be; None while it is not worth trying."""
        link = self._links.get(address)
        if link is not None and not link.down and link.drafter_id == drafter_id:
            return link
        now_s = self._clock()
        self._redial_at_s = {a: s for a, s in self._redial_at_s.items() if s > now_s}
        if address in self._redial_at_s or link is not None or len(self._links) >= _MAX_LINKS:
            return None
        self._links[address] = DraftLink(
            drafter_id=drafter_id,
            address=address,
            hello=self._hello,
            queue_bytes=self._queue_bytes,
            connect_timeout_s=self._connect_timeout_s,
            on_lost=self._lost,
            on_down=self._down,
            counters=self.stream_counters,
        )
        return self._links[address]

    def _cut(self, updates: Sequence[Update]) -> Iterable[_Piece]:
        """Cut chunks so that each piece alone fits a frame; keeps the sessions' positions."""
        for update in updates:
            session, chunk = self._sessions.get(update.rid), update.chunk
            if session is None:
                continue
            if chunk.first_position != session.num_rows:
                self.unbind(update.rid)  # a hole: the drafter could not use the rows
                continue
            num_rows = len(chunk.ids)
            row_bytes = max(1, chunk.num_bytes // num_rows)
            rows_per_piece = max(1, MAX_COMMIT_BYTES // row_bytes)
            for start in range(0, num_rows, rows_per_piece):
                end = min(start + rows_per_piece, num_rows)
                last = end == num_rows
                session.digest = (
                    update.digest if last else digest.extend(session.digest, chunk.ids[start:end])
                )
                session.num_rows += end - start
                yield _Piece(
                    session=session,
                    chunk=chunk,
                    start=start,
                    end=end,
                    digest=session.digest,
                    want_draft=update.want_draft and last,
                )

    def _post_commit(self, link: DraftLink, lane_id: str, pieces: Sequence[_Piece]) -> None:
        pieces = [p for p in pieces if self._sessions.get(p.session.rid) is p.session]
        if not pieces:
            return
        frame = _commit_frame(lane_id, pieces)
        if link.post(frame, _HEAD_BYTES + frame.features.nbytes + 4 * len(frame.ids)):
            self.counters.commit_frames += 1
            self.counters.committed_rows += len(frame.ids)
            return
        for piece in pieces:
            self.counters.overflowed += 1
            self.unbind(piece.session.rid)

    def _post_release(self, link: DraftLink, lane_id: str, rids: Sequence[int]) -> None:
        """Best effort: where it finds no room, the drafter's idle time does the same later."""
        link.post(Release(lane_id=lane_id, rid=np.array(rids, np.int64)), _HEAD_BYTES)

    def _lost(self, frame: Lost) -> None:
        for rid, epoch in zip(frame.rid.tolist(), frame.epoch.tolist(), strict=True):
            session = self._sessions.get(rid)
            if session and (session.lane_id, session.epoch) == (frame.lane_id, epoch):
                self.counters.lost += 1
                del self._sessions[rid]
                self._unbound.add(rid)

    def _down(self, link: DraftLink) -> None:
        self.counters.links_failed += 1
        if self._links.get(link.address) is link:
            del self._links[link.address]
        self._redial_at_s[link.address] = self._clock() + _REDIAL_S
        for rid in [s.rid for s in self._sessions.values() if s.link is link]:
            del self._sessions[rid]
            self._unbound.add(rid)


def _pack(pieces: Iterable[_Piece]) -> Iterable[list[_Piece]]:
    """Group pieces into frames: same feature layout, one piece a session, up to the byte limit."""
    group: list[_Piece] = []
    num_bytes = 0
    for piece in pieces:
        size = piece.chunk.num_bytes * (piece.end - piece.start) // len(piece.chunk.ids)
        if group and (
            num_bytes + size > MAX_COMMIT_BYTES
            or _layout(piece) != _layout(group[0])
            or any(piece.session is other.session for other in group)
        ):
            yield group
            group, num_bytes = [], 0
        group.append(piece)
        num_bytes += size
    if group:
        yield group


def _layout(piece: _Piece) -> tuple[str, int]:
    return piece.chunk.features.dtype.str, piece.chunk.features.shape[1]


def _commit_frame(lane_id: str, pieces: Sequence[_Piece]) -> Commit:
    has_features = pieces[0].chunk.features.size > 0
    features = [
        p.chunk.features[p.start : p.end] if has_features else p.chunk.features for p in pieces
    ]
    return Commit(
        lane_id=lane_id,
        rid=np.array([p.session.rid for p in pieces], np.int64),
        epoch=np.array([p.session.epoch for p in pieces], np.int32),
        first_position=np.array([p.chunk.first_position + p.start for p in pieces], np.int32),
        num_rows=np.array([p.end - p.start for p in pieces], np.int32),
        digest=np.array([p.digest for p in pieces], np.uint64),
        want_draft=np.array([p.want_draft for p in pieces], np.uint8),
        ids=np.concatenate([p.chunk.ids[p.start : p.end] for p in pieces]),
        features=np.concatenate(features) if len(features) > 1 else features[0],
    )
