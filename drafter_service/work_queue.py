"""What waits for the drafter: one queue over all verifier streams, bounded in bytes.

A stream that finds it full waits, and so stops reading: the verifier's own bounded queue fills up
behind it, and its sessions are unbound there. Memory here never grows with a slow drafter.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from cluster.wire import Commit
from drafter_service.drafter import Work


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Work taken at once."""

    work: tuple[Work, ...]
    oldest_s: float
    """When the first of it came in; of an empty batch, when it was taken."""


class WorkQueue:
    """First in, first out, for many producers and one consumer in one event loop.

    Args:
        max_bytes: most bytes of frames waiting; one frame always fits into an empty queue.
        max_rows: most feature rows in a batch, unless one frame alone has more: bounds how long a
            prompt can keep the blocks behind it waiting.
    """

    def __init__(self, *, max_bytes: int, max_rows: int) -> None:
        self._max_bytes = max_bytes
        self._max_rows = max_rows
        self._items: deque[tuple[Work, int, float]] = deque()
        self._num_bytes = 0
        self._ready = asyncio.Event()
        self._room = asyncio.Condition()

    @property
    def num_bytes(self) -> int:
        """Bytes of frames waiting."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._items)

    async def put(self, work: Work, now_s: float) -> None:
        """Queue work, waiting for room. Cancelling leaves the queue as it was."""
        size = frame_bytes(work)
        async with self._room:
            await self._room.wait_for(
                lambda: not self._items or self._num_bytes + size <= self._max_bytes
            )
        self.put_now(work, now_s)

    def put_now(self, work: Work, now_s: float) -> None:
        """Queue work past the bound: a stream's last word, which must not wait."""
        size = frame_bytes(work)
        self._items.append((work, size, now_s))
        self._num_bytes += size
        self._ready.set()

    async def wait(self, timeout_s: float) -> bool:
        """Whether there is work, after waiting for it at most this long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            return False
        return True

    async def take(self, now_s: float) -> Batch:
        """All that waits, in order, up to ``max_rows`` feature rows."""
        work: list[Work] = []
        oldest_s, rows = now_s, 0
        while self._items:
            item, size, since_s = self._items[0]
            more = len(item.frame.ids) if isinstance(item.frame, Commit) else 0
            if rows and more and rows + more > self._max_rows:
                break
            self._items.popleft()
            self._num_bytes -= size
            rows += more
            oldest_s = min(oldest_s, since_s)
            work.append(item)
        if not self._items:
            self._ready.clear()
        async with self._room:
            self._room.notify_all()
        return Batch(work=tuple(work), oldest_s=oldest_s)


def frame_bytes(work: Work) -> int:
    """About what a frame holds in memory."""
    frame = work.frame
    if isinstance(frame, Commit):
        return frame.features.nbytes + frame.ids.nbytes + 64 * len(frame.rid)
    return 256
