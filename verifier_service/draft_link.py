"""One stream to one drafter, dialled when first needed, fed from a bounded queue.

Posting never waits: a drafter that is slow, unreachable or dead costs its own sessions, never a
verify step, and never more memory than the queue's bound.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from cluster.byte_queue import ByteQueue, QueueClosed
from cluster.errors import DSparkError, Unavailable
from cluster.streams import FrameStream, StreamCounters, StreamLimits, check_models, connect
from cluster.wire import MAX_COMMIT_BYTES, Frame, Hello, Lost, Ping, Pong, Refused

logger = logging.getLogger(__name__)

_SEND_TIMEOUT_S: Final = 10.0
# The link's own queue is the one that counts: the stream holds two frames at most.
_STREAM_LIMITS: Final = StreamLimits(
    max_frames=2, max_bytes=2 * MAX_COMMIT_BYTES, send_timeout_s=_SEND_TIMEOUT_S
)
_MAX_FRAMES: Final = 1 << 14


class DraftLink:
    """A link, up or still dialling, until `down`.

    Args:
        drafter_id: member expected at the address; another one there is an error.
        hello: ours; its drafter fingerprint must be the drafter's.
        queue_bytes: most bytes waiting, dialling time included.
        on_lost: called with each `Lost` of the drafter.
        on_down: called once, when the link has failed; not on `close`.
    """

    def __init__(
        self,
        *,
        drafter_id: str,
        address: str,
        hello: Hello,
        queue_bytes: int,
        connect_timeout_s: float,
        on_lost: Callable[[Lost], None],
        on_down: Callable[[DraftLink], None],
        counters: StreamCounters,
    ) -> None:
        self.drafter_id = drafter_id
        self.address = address
        self._hello = hello
        self._connect_timeout_s = connect_timeout_s
        self._on_lost = on_lost
        self._on_down = on_down
        self._counters = counters
        self._queue: ByteQueue[Frame] = ByteQueue(max_items=_MAX_FRAMES, max_bytes=queue_bytes)
        self._task = asyncio.create_task(self._run(), name=f"draft link to {drafter_id}")

    @property
    def down(self) -> bool:
        """Whether the link takes nothing any more."""
        return self._queue.closed

    @property
    def queued_bytes(self) -> int:
        """Bytes waiting."""
        return self._queue.num_bytes

    def post(self, frame: Frame, num_bytes: int) -> bool:
        """Queue a frame of about ``num_bytes``; False if there is no room or the link is down."""
        try:
            return self._queue.try_put(frame, num_bytes)
        except QueueClosed:
            return False

    async def close(self) -> None:
        """End the link at once; what is queued is dropped. Idempotent."""
        self._queue.close(discard=True)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            stream = await connect(
                self.address,
                self._hello,
                expect_role="drafter",
                timeout_s=self._connect_timeout_s,
                counters=self._counters,
                limits=_STREAM_LIMITS,
            )
            try:
                self._check(stream)
                await self._serve(stream)
            finally:
                await stream.close()
        except DSparkError as error:
            logger.warning("drafter %s: %s", self.drafter_id, error)
        except Exception:
            logger.exception("link to drafter %s failed", self.drafter_id)
        self._queue.close(discard=True)
        self._on_down(self)

    def _check(self, stream: FrameStream) -> None:
        check_models(self._hello, stream.peer)
        if stream.peer.member_id != self.drafter_id:
            raise Unavailable(f"{stream.peer.member_id!r} answers at {self.address}")

    async def _serve(self, stream: FrameStream) -> None:
        """Pump and listen until either fails. Raises what failed."""
        tasks = {
            asyncio.create_task(self._pump(stream), name=f"pump to {self.drafter_id}"),
            asyncio.create_task(self._listen(stream), name=f"listen to {self.drafter_id}"),
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, stream: FrameStream) -> None:
        while True:
            await stream.send(await self._queue.get())

    async def _listen(self, stream: FrameStream) -> None:
        while True:
            frame = await stream.recv()
            if isinstance(frame, Lost):
                self._on_lost(frame)
            elif isinstance(frame, Ping):
                stream.try_send(Pong(nonce=frame.nonce))
            elif isinstance(frame, Refused):
                logger.warning("drafter %s refused: %s", self.drafter_id, frame.message)
