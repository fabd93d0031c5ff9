"""The draft side of a lane: which drafter serves a request, and which block belongs to it. Pure.

A block counts only if it comes from the request's own drafter, in its session's epoch, at its
present anchor, behind its very text (digest), and was asked for. Everything else is counted by
reason and dropped: a draft never stops a request, it only goes without.
"""

from __future__ import annotations

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

    def expect(self, request: LaneRequest, now: float) -> None:
        """A block was asked for behind the request's new anchor: wait for it."""
        drafter = request.drafter
        link = self._book.link(drafter.drafter_id) if drafter else None
        if drafter is None or link is None or request.max_draft == 0:
            request.enter(Phase.READY, now)
            return
        request.asks[request.anchor] = now
        if request.behind:
            self._behind[drafter.drafter_id] = now
        while len(request.asks) > _KEPT_ASKS:
            del request.asks[min(request.asks)]
        request.due = now + link.wait_s()
        request.enter(Phase.AWAITING, now)
        early, request.early = request.early, None
        if early is not None:
            self.take(drafter.drafter_id, request, early, now)

    def expire(self, request: LaneRequest, now: float) -> None:
        """The block did not come in time: the request goes without."""
        self._counters.num_late_drafts += 1
        if request.drafter and (link := self._book.link(request.drafter.drafter_id)):
            link.miss()
        request.enter(Phase.READY, now)

    def take(
        self, drafter_id: str, request: LaneRequest, block: DraftBlock | Malformed, now: float
    ) -> None:
        """Keep the block if it is the one that the request waits for; else count why not.

        The verifier tells the drafter first and us next, over another stream: a quick drafter's
        block may come before the result that it follows. It is judged when that is in.
        """
        if request.drafter is None or request.drafter.drafter_id != drafter_id:
            self._counters.stale["drafter"] += 1
            return
        if block.epoch != request.session_epoch:
            self._counters.stale["epoch"] += 1
            return
        if block.anchor > request.anchor and request.phase in (Phase.PREFILLING, Phase.IN_STEP):
            request.early = block
            return
        asked = request.asks.pop(block.anchor, None)
        if asked is not None and (link := self._book.link(drafter_id)):
            each = 1 / max(block.batch_size, 1)
            link.observe(
                block.batch_size,
                block.draft_s,
                now - asked,
                weight=each,
                usual=self._behind.get(drafter_id) != asked,
            )
        if block.anchor != request.anchor:
            self._counters.stale["anchor"] += 1
        elif asked is None:
            self._counters.stale["unasked"] += 1
        elif request.phase not in (Phase.AWAITING, Phase.READY):
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
