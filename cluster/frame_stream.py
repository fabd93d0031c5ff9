"""One end of an open frame stream: a reader, a writer, and a bounded queue for each.

Nothing outside the two tasks touches the gRPC call, so cancelling a `recv` or `send` never breaks
a stream (cancelling a `grpc.aio` read does).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import grpc

from cluster.byte_queue import ByteQueue, QueueClosed
from cluster.errors import DSparkError, FrameError, Unavailable
from cluster.timeouts import require_timeout
from cluster.wire import MAX_FRAME_BYTES, Frame, Hello, Refused, decode, encode

logger = logging.getLogger(__name__)

_FLUSH_S: Final = 1.0


@dataclass(kw_only=True)
class StreamCounters:
    """What passed, over all streams that share the object."""

    frames_in: int = 0
    frames_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    refused: int = 0
    """Frames or peers that we refused."""
    dropped: int = 0
    """Frames that `FrameStream.try_send` could not queue."""


@dataclass(frozen=True, kw_only=True)
class StreamLimits:
    """Bounds of one stream's queues, each way."""

    max_frames: int = 1024
    max_bytes: int = MAX_FRAME_BYTES
    send_timeout_s: float = 30.0
    """Longest wait for room in the send queue before the peer counts as stuck."""


class _Call(Protocol):
    """What the two ends of a `grpc.aio` stream have in common."""

    async def read(self) -> Any: ...

    async def write(self, message: bytes) -> None: ...


class FrameStream:
    """One end of an open stream. Made by `connect` and `DataServer`, with the Hellos exchanged."""

    def __init__(
        self,
        call: _Call,
        peer: Hello,
        *,
        counters: StreamCounters,
        limits: StreamLimits,
        hang_up: Callable[[], Awaitable[None]] | None = None,
        end_call: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.peer = peer
        self.counters = counters
        self._call = call
        self._send_timeout_s = require_timeout("send_timeout_s", limits.send_timeout_s)
        self._end_writes = hang_up
        self._end_call = end_call
        self._failure: DSparkError | None = None
        self._reason = "closed here"
        self._over = asyncio.Event()
        self._inbox: ByteQueue[Frame] = ByteQueue(
            max_items=limits.max_frames, max_bytes=limits.max_bytes
        )
        self._outbox: ByteQueue[bytes] = ByteQueue(
            max_items=limits.max_frames, max_bytes=limits.max_bytes
        )
        name = f"{peer.role}:{peer.member_id}"
        self._reader = asyncio.create_task(self._read(), name=f"frames from {name}")
        self._writer = asyncio.create_task(self._write(), name=f"frames to {name}")

    @property
    def closed(self) -> bool:
        """Whether the stream is over, from whichever end."""
        return self._over.is_set()

    async def send(self, frame: Frame) -> None:
        """Queue a frame, waiting for room.

        Raises:
            FrameError: the frame breaks the wire rules; nothing was sent.
            Unavailable: the stream is over, or the peer took nothing for ``send_timeout_s``.
        """
        data = encode(frame)
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await self._outbox.put(data, len(data))
        except QueueClosed:
            raise self._gone() from None
        except TimeoutError:
            raise Unavailable(
                f"{self._name()} took no frame for {self._send_timeout_s:.1f} s"
            ) from None

    def try_send(self, frame: Frame) -> bool:
        """Queue a frame if there is room; else (or once the stream is over) False, and counted.

        Raises:
            FrameError: the frame breaks the wire rules.
        """
        data = encode(frame)
        try:
            queued = self._outbox.try_put(data, len(data))
        except QueueClosed:
            queued = False
        self.counters.dropped += not queued
        return queued

    async def recv(self) -> Frame:
        """The next frame. Safe to cancel: a frame is either returned or still queued.

        Raises:
            FrameError: the peer sent a malformed frame, which was refused; the stream is over.
            Unavailable: the stream is over.
        """
        try:
            return await self._inbox.get()
        except QueueClosed:
            failure, self._failure = self._failure, None
            raise failure or self._gone() from None

    async def refuse(self, error: DSparkError, *, fatal: bool = True) -> None:
        """Tell the peer what was wrong; a fatal refusal ends the stream."""
        self.counters.refused += 1
        with contextlib.suppress(Unavailable):
            await self.send(refusal(error, fatal=fatal))
        if fatal:
            await self.close()

    async def close(self) -> None:
        """Flush what is queued (within a second), end the stream, free its tasks. Idempotent."""
        self._outbox.close()
        self._inbox.close(discard=True)
        await asyncio.wait({self._writer}, timeout=_FLUSH_S)
        if self._end_call is not None and self._writer.done():
            # Our half is closed: the peer ends the call when it sees that.
            await asyncio.wait({self._reader}, timeout=_FLUSH_S)
        for task in (self._writer, self._reader):
            task.cancel()
        await asyncio.gather(self._writer, self._reader, return_exceptions=True)
        self._over.set()
        if self._end_call is not None:
            end_call, self._end_call = self._end_call, None
            await end_call()

    def abandon(self, reason: str) -> None:
        """The transport says the peer is gone: end reading and writing without a word."""
        self._finish(reason)
        self._outbox.close(discard=True)
        self._reader.cancel()
        self._writer.cancel()

    async def _read(self) -> None:
        reason = "closed by the peer"
        try:
            while (data := await self._call.read()) is not grpc.aio.EOF:
                self.counters.frames_in += 1
                self.counters.bytes_in += len(data)
                await self._inbox.put(decode(data), len(data))
        except FrameError as error:
            reason = f"refused a frame: {error}"
            self._failure = error
            self.counters.refused += 1
            logger.warning("refused a frame of %s: %s", self._name(), error)
            if not self._outbox.closed:
                last_word = encode(refusal(error, fatal=True))
                self._outbox.force_put(last_word, len(last_word))
        except QueueClosed:
            reason = "closed here"
        except Exception as error:  # grpc raises several kinds when a call breaks
            reason = describe(error)
        finally:
            self._finish(reason)

    async def _write(self) -> None:
        try:
            while True:
                data = await self._outbox.get()
                await self._call.write(data)
                self.counters.frames_out += 1
                self.counters.bytes_out += len(data)
        except QueueClosed:
            if self._end_writes is not None:
                with contextlib.suppress(Exception):  # the call may be over already
                    await self._end_writes()
        except Exception as error:  # as above; the reader meets the same end
            self._finish(describe(error))

    def _finish(self, reason: str) -> None:
        if not self._over.is_set():
            self._reason = reason
            self._over.set()
        self._inbox.close()
        self._outbox.close()

    def _gone(self) -> Unavailable:
        return Unavailable(f"stream with {self._name()} is over: {self._reason}")

    def _name(self) -> str:
        return f"{self.peer.role} {self.peer.member_id!r}"


def refusal(error: DSparkError, *, fatal: bool) -> Refused:
    """The frame that carries an error to the peer."""
    return Refused(code=type(error).__name__, message=str(error)[:4096], fatal=fatal)


def describe(error: Exception) -> str:
    """What broke a call, in one line."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}".rstrip(": ")
