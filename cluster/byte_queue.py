"""A queue bounded in items and in bytes, for one producer side and one consumer in one event loop.

An item larger than the whole byte bound is still taken when the queue is empty: it could never
fit otherwise. So the memory behind a queue is at most ``max_bytes`` or one item, whichever is more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class QueueClosed(Exception):
    """Nothing more will come out (get) or go in (put)."""


class ByteQueue(Generic[T]):
    """First in, first out. `close` ends the producers at once and the consumer once it is empty."""

    def __init__(self, *, max_items: int, max_bytes: int) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._items: deque[tuple[T, int]] = deque()
        self._closed = False
        self._num_bytes = 0
        self._ready = asyncio.Event()  # something to get, or closed
        self._room = asyncio.Event()  # something was taken, or closed

    def __len__(self) -> int:
        return len(self._items)

    @property
    def num_bytes(self) -> int:
        """Bytes queued now."""
        return self._num_bytes

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def try_put(self, item: T, num_bytes: int) -> bool:
        """Queue ``item`` if there is room.

        Raises:
            QueueClosed: the queue takes nothing any more.
        """
        if self._closed:
            raise QueueClosed
        full = len(self._items) >= self._max_items or self._num_bytes + num_bytes > self._max_bytes
        if full and self._items:
            return False
        self.force_put(item, num_bytes)
        return True

    def force_put(self, item: T, num_bytes: int) -> None:
        """Queue ``item`` past the bounds (the one last word before closing)."""
        if self._closed:
            raise QueueClosed
        self._items.append((item, num_bytes))
        self._num_bytes += num_bytes
        self._ready.set()

    async def put(self, item: T, num_bytes: int) -> None:
        """Queue ``item``, waiting for room. Raises `QueueClosed`."""
        while not self.try_put(item, num_bytes):
            self._room.clear()
            await self._room.wait()

    async def get(self) -> T:
        """Take the oldest item, waiting for one. Raises `QueueClosed` when closed and empty."""
        while not self._items:
            if self._closed:
                raise QueueClosed
            self._ready.clear()
            await self._ready.wait()
        item, num_bytes = self._items.popleft()
        self._num_bytes -= num_bytes
        self._room.set()
        return item

    def close(self, *, discard: bool = False) -> None:
        """Take no more items; with ``discard`` forget those queued as well. Idempotent."""
        self._closed = True
        if discard:
            self._items.clear()
            self._num_bytes = 0
        self._ready.set()
        self._room.set()
