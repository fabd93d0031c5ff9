"""Draft sessions: what each covers, who owns it, and when it has to go. Plain data, no tensors.

A session covers positions 0..covered-1 without a hole, and knows the id at position ``covered``:
the next anchor, which has no row yet. A commit that does not start exactly there, or whose digest
differs, loses the session; nothing is ever guessed. Time is passed in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cluster import digest
from cluster.wire import Open, Sampling
from drafter_service.draft_kv import BLOCK_POSITIONS, BlockAllocator

Key = tuple[str, int]
"""(lane id, request id)."""


@dataclass(slots=True, kw_only=True, eq=False)
class DraftSession:
    """State of one request at this drafter."""

    lane_id: str
    rid: int
    epoch: int
    owner: int
    """Number of the verifier stream that feeds it."""
    sampling: Sampling
    digest: int
    """Of ids[0..covered]."""
    first_id: int
    last_id: int
    """Id at position ``covered``: the anchor of the next block."""
    covered: int = 0
    """Positions 0..covered-1 are here: they have keys and values, or their rows wait to get them
    (`drafter_service.pending_rows`), or they have left every window."""
    blocks: list[int] = field(default_factory=list)
    """KV blocks of positions ``first_block * BLOCK_POSITIONS`` onwards."""
    first_block: int = 0
    last_used_s: float = 0.0

    @property
    def key(self) -> Key:
        return (self.lane_id, self.rid)

    def slots(self, start: int, stop: int) -> NDArray[np.int64]:
        """KV slots of positions start..stop-1, which are still kept."""
        positions = np.arange(start, stop)
        numbers = np.asarray(self.blocks, np.int64)
        blocks = numbers[positions // BLOCK_POSITIONS - self.first_block]
        found: NDArray[np.int64] = blocks * BLOCK_POSITIONS + positions % BLOCK_POSITIONS
        return found


@dataclass(frozen=True, kw_only=True)
class LostSession:
    """A session that is gone, for its lane and its verifier to know."""

    lane_id: str
    rid: int
    epoch: int
    owner: int
    reason: str


@dataclass(slots=True, kw_only=True)
class SessionCounters:
    """What happened to sessions so far."""

    opened: int = 0
    stale: int = 0
    """Frames of an old epoch, dropped."""
    unknown: int = 0
    gaps: int = 0
    diverged: int = 0
    """Commits whose digest or first position showed that the pools disagree."""
    expired: int = 0
    evicted: int = 0
    full: int = 0
    """Sessions refused or lost for want of room."""
    failed: int = 0
    """Sessions lost to an error while computing."""
    rows_caught_up: int = 0
    """Rows that waited until a draft was asked for (`drafter_service.pending_rows`)."""
    rows_overdue: int = 0
    """Rows computed without one, because more than the bound were waiting."""


class SessionTable:
    """All sessions of a drafter, in order of use, within bounds.

    Args:
        max_sessions: most sessions at once.
        max_tokens: most draft KV positions over all sessions (rounded down to blocks).
        max_positions: longest context of one session.
        idle_s: a session unused for this long expires.
        busy_s: a session used within this time is never evicted for another: a pool that is too
            small loses newcomers instead of throwing active requests out in turn.
    """

    def __init__(
        self,
        *,
        max_sessions: int,
        max_tokens: int,
        max_positions: int,
        idle_s: float,
        busy_s: float = 1.0,
    ) -> None:
        self.counters = SessionCounters()
        self.allocator = BlockAllocator(max_tokens // BLOCK_POSITIONS)
        self._max_sessions = max_sessions
        self._max_positions = max_positions
        self._idle_s = idle_s
        self._busy_s = busy_s
        self._sessions: OrderedDict[Key, DraftSession] = OrderedDict()
        self._lost: list[LostSession] = []

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, lane_id: str, rid: int) -> DraftSession | None:
        """A live session."""
        return self._sessions.get((lane_id, rid))

    def take_lost(self) -> tuple[LostSession, ...]:
        """Sessions lost since the last call."""
        lost, self._lost = tuple(self._lost), []
        return lost

    def open(self, frame: Open, owner: int, now_s: float) -> DraftSession | None:
        """Start a session, replacing one of a lower epoch. None: stale, or no room (then lost)."""
        key = (frame.lane_id, frame.rid)
        known = self._sessions.get(key)
        if known is not None and frame.epoch <= known.epoch:
            self.counters.stale += 1
            return None
        if known is not None:
            self._drop(known)
        session = DraftSession(
            lane_id=frame.lane_id,
            rid=frame.rid,
            epoch=frame.epoch,
            owner=owner,
            sampling=frame.sampling,
            digest=digest.of([frame.first_id]),
            first_id=frame.first_id,
            last_id=frame.first_id,
            last_used_s=now_s,
        )
        if not self._make_room(lambda: len(self._sessions) < self._max_sessions, now_s):
            self.counters.full += 1
            self._report(session, f"no room: {self._max_sessions} sessions are active")
            return None
        self._sessions[key] = session
        self.counters.opened += 1
        return session

    def commit(
        self,
        *,
        key: Key,
        epoch: int,
        owner: int,
        first_position: int,
        ids: list[int],
        digest_after: int,
        now_s: float,
    ) -> DraftSession | None:
        """Advance a session over newly committed rows and reserve their KV.

        Returns:
            The session, now covering ``first_position + len(ids)`` positions, whose keys and values
            the caller must write before it drafts; None if the commit was stale or the session is
            lost.
        """
        session = self._sessions.get(key)
        if session is not None and epoch < session.epoch:
            self.counters.stale += 1
            return None
        if session is None or epoch > session.epoch or owner != session.owner:
            self.counters.unknown += 1
            self._lost.append(
                LostSession(
                    lane_id=key[0], rid=key[1], epoch=epoch, owner=owner, reason="no such session"
                )
            )
            return None
        if first_position != session.covered:
            self.counters.gaps += 1
            self.lose(
                session, f"commit starts at {first_position}, session covers {session.covered}"
            )
            return None
        if digest.extend(session.digest, ids) != digest_after:
            self.counters.diverged += 1
            self.lose(session, f"digest differs after position {first_position + len(ids)}")
            return None
        session.last_used_s = now_s
        self._sessions.move_to_end(key)
        if not self._reserve(session, first_position + len(ids), now_s):
            return None
        session.covered += len(ids)
        session.digest = digest_after
        session.last_id = ids[-1] if ids else session.last_id
        return session

    def trim(self, session: DraftSession, first_needed: int) -> None:
        """Free the blocks that lie wholly before position ``first_needed``."""
        num = min(first_needed // BLOCK_POSITIONS - session.first_block, len(session.blocks))
        if num > 0:
            self.allocator.give_back(session.blocks[:num])
            del session.blocks[:num]
            session.first_block += num

    def lose(self, session: DraftSession, reason: str) -> None:
        """Drop a session and report it. One that is gone already is left alone."""
        if self._sessions.get(session.key) is session:
            self._drop(session)
            self._report(session, reason)

    def release(self, lane_id: str, rids: Iterable[int], owner: int) -> None:
        """Drop sessions whose requests ended. Unknown ones and other owners' are left alone."""
        for rid in rids:
            session = self._sessions.get((lane_id, rid))
            if session is not None and session.owner == owner:
                self._drop(session)

    def hang_up(self, owner: int) -> None:
        """Drop, without a word, what a closed stream owned: nobody can continue it."""
        for session in [s for s in self._sessions.values() if s.owner == owner]:
            self._drop(session)

    def expire(self, now_s: float) -> None:
        """Lose the sessions that nobody has used for ``idle_s``."""
        while self._sessions:
            oldest = next(iter(self._sessions.values()))
            if now_s - oldest.last_used_s <= self._idle_s:
                return
            self.counters.expired += 1
            self.lose(oldest, f"idle for {now_s - oldest.last_used_s:.0f} s")

    def _reserve(self, session: DraftSession, num_positions: int, now_s: float) -> bool:
        """Take the blocks for a context of this length; the session is lost if there are none."""
        if num_positions > self._max_positions:
            self.counters.full += 1
            self.lose(session, f"context of {num_positions} exceeds {self._max_positions}")
            return False
        needed = -(-num_positions // BLOCK_POSITIONS) - session.first_block - len(session.blocks)
        if needed > 0:
            if not self._make_room(lambda: self.allocator.num_free >= needed, now_s):
                self.counters.full += 1
                self.lose(session, "no room: the draft KV of active sessions fills the bound")
                return False
            session.blocks += self.allocator.take(needed)
        return True

    def _make_room(self, enough: Callable[[], bool], now_s: float) -> bool:
        """Evict least recently used sessions, but never busy ones, until there is enough."""
        while not enough():
            oldest = next(iter(self._sessions.values()), None)
            if oldest is None or now_s - oldest.last_used_s < self._busy_s:
                return False
            self.counters.evicted += 1
            self.lose(oldest, "evicted: least recently used")
        return True

    def _drop(self, session: DraftSession) -> None:
        del self._sessions[session.key]
        self.allocator.give_back(session.blocks)
        session.blocks.clear()

    def _report(self, session: DraftSession, reason: str) -> None:
        self._lost.append(
            LostSession(
                lane_id=session.lane_id,
                rid=session.rid,
                epoch=session.epoch,
                owner=session.owner,
                reason=reason,
            )
        )
