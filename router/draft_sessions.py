"""The draft side of a lane: which drafter serves a request, and which block belongs to it. Pure.

A block counts only if it comes from the request's own drafter, in its session's epoch, at its
present anchor, behind its very text (digest), and was asked for. Everything else is counted by
reason and dropped: a draft never stops a request, it only goes without.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Final

from router.blocks import DraftBlock, Malformed
from router.counters import LaneCounters
from router.drafter_book import DrafterBook
from router.lane_request import LaneRequest, Phase

_KEPT_ASKS: Final = 4
_FIRST_PAUSE_S: Final = 0.1
_MAX_PAUSE_S: Final = 10.0


class DraftSessions:
    """Draft sessions of one lane's requests.

    Args:
        fingerprint: of the drafter projection that the verifier holds; empty: it cannot be drafted.
        book: drafters, shared by the lanes of a router.
        counters: likewise.
    """

    def __init__(self, *, fingerprint: str, book: DrafterBook, counters: LaneCounters) -> None:
        self._fingerprint = fingerprint
        self._book = book
        self._counters = counters
        self._behind: dict[str, float] = {}
        """By drafter: when it was last asked for a block of a session that is behind. All that it
        was asked for at that time waits for it."""

    # --- sessions -----------------------------------------------------------------------------

    def bind(self, request: LaneRequest) -> bool:
        """Give a request a drafter if it can use one and there is one."""
        if self._fingerprint and request.wants_draft:
            request.drafter = self._book.bind(
                request.rid, self._fingerprint, avoid=request.failed_drafter
            )
        return request.drafter is not None

    def rebind(self, request: LaneRequest, now: float) -> bool:
        """Give a request that has no drafter a new one, if it is time; whether that was done."""
        if request.drafter is not None or now < request.rebind_at or not self.bind(request):
            return False
        request.session_epoch += 1
        request.asks.clear()
        self._counters.num_rebinds += 1
        return True

    def unbind(self, request: LaneRequest, now: float, *, pause: bool) -> None:
        """The session is of no use any more: the request goes plain until it is rebound.

        Args:
            pause: put the next attempt off, longer each time: reopening a session costs the
                transfer of all its features.
        """
        if request.drafter is None:
            return
        request.failed_drafter = request.drafter.drafter_id
        self.forget(request)
        request.early = None
        if pause:
            request.rebind_at = now + min(_FIRST_PAUSE_S * 2**request.num_unbinds, _MAX_PAUSE_S)
            request.num_unbinds += 1
        if request.phase is Phase.AWAITING:
            request.enter(Phase.READY, now)

    def forget(self, request: LaneRequest) -> None:
        """The request leaves its drafter."""
        if request.drafter is not None:
            self._book.unbind(request.rid, request.drafter.drafter_id)
            request.drafter = None

    def catches_up(self, asked: float) -> bool:
        """Whether a drafter has to catch up before it has the blocks that were asked for then."""
        return asked in self._behind.values()

    # --- blocks -------------------------------------------------------------------------------

    def expect(self, request: LaneRequest, now: float, *, num_blocks: int = 0) -> None:
        """A block was asked for behind the request's new anchor: wait for it.

        Args:
            num_blocks: that its drafter was asked for with it; 0: not known.
        """
        drafter = request.drafter
        link = self._book.link(drafter.drafter_id) if drafter is not None else None
        if drafter is None or link is None or request.remaining < 2:
            request.enter(Phase.READY, now)
            return
        asks = request.asks
        asks[request.anchor] = now
        if request.behind:
            self._behind[drafter.drafter_id] = now
        while len(asks) > _KEPT_ASKS:
            del asks[min(asks)]
        request.due = now + link.wait_s(num_blocks)
        request.enter(Phase.AWAITING, now)
        early, request.early = request.early, None
        if early is not None:
            self.take(drafter.drafter_id, request, early, now)

    def expire(self, request: LaneRequest, now: float) -> None:
        """The block did not come in time: the request goes without."""
        self._counters.num_late_drafts += 1
        asked = request.asks.get(request.anchor)
        link = self._book.link(request.drafter.drafter_id) if request.drafter else None
        if link is not None and asked is not None:
            link.miss(asked)
        request.enter(Phase.READY, now)

    def take(
        self, drafter_id: str, request: LaneRequest, block: DraftBlock | Malformed, now: float
    ) -> None:
        """Keep the block if it is the one that the request waits for; else count why not.

        The verifier tells the drafter first and us next, over another stream: a quick drafter's
        block may come before the result that it follows. It is judged when that is in.
        """
        self.take_all(drafter_id, {block.rid: request}, [block], now)

    def take_all(
        self,
        drafter_id: str,
        requests: Mapping[int, LaneRequest],
        blocks: Iterable[DraftBlock | Malformed],
        now: float,
    ) -> None:
        """The same for the blocks of one frame; how long they took is learnt when all are in.

        Args:
            requests: of the lane, by id.
        """
        heard = []
        for block in blocks:
            request = requests.get(block.rid)
            if request is None:
                self._counters.stale["unknown"] += 1
                continue
            asked = self._take(drafter_id, request, block, now)
            if asked is not None:
                heard.append((asked, block.batch_size, block.draft_s))
        link = self._book.link(drafter_id)
        if link is None:
            return
        for (asked, batch_size, draft_s), same in itertools.groupby(heard):
            link.observe(
                batch_size,
                draft_s,
                now - asked,
                weight=1 / max(batch_size, 1),
                usual=self._behind.get(drafter_id) != asked,
                times=len(list(same)),
            )

    def _take(
        self, drafter_id: str, request: LaneRequest, block: DraftBlock | Malformed, now: float
    ) -> float | None:
        """One of them; when it was asked for, None if it was not."""
        if request.drafter is None or request.drafter.drafter_id != drafter_id:
            self._counters.stale["drafter"] += 1
            return None
        if block.epoch != request.session_epoch:
            self._counters.stale["epoch"] += 1
            return None
        anchor, phase = request.anchor, request.phase
        if block.anchor > anchor and phase in (Phase.PREFILLING, Phase.IN_STEP):
            request.early = block
            return None
        asked = request.asks.pop(block.anchor, None)
        if block.anchor != anchor:
            self._counters.stale["anchor"] += 1
        elif asked is None:
            self._counters.stale["unasked"] += 1
        elif phase not in (Phase.AWAITING, Phase.READY):
            self._counters.stale["late"] += 1
        elif isinstance(block, Malformed):
            self._counters.num_malformed += 1
            request.enter(Phase.READY, now)
        elif block.digest != request.digest:
            # The session follows another text than the request: start it anew.
            self._counters.stale["digest"] += 1
            self.unbind(request, now, pause=True)
        else:
            request.block, request.num_unbinds = block, 0
            request.enter(Phase.READY, now)
        return asked
