"""The router's end of the stream to one verifier: frames in, pings out, and when it broke."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

from cluster.errors import DSparkError, FrameError, Unavailable, error_for
from cluster.streams import FrameStream
from cluster.wire import Drain, Ping, Pong, Refused, StepResult

_PINGS_PER_TTL: Final = 3


class VerifierLink:
    """A leased verifier's stream with a reader and a lease keeper beside it.

    Args:
        stream: to the verifier; the link closes it.
        ttl_s: of the lease.
        wake: set whenever something has come in, or the stream broke.
    """

    def __init__(self, stream: FrameStream, *, ttl_s: float, wake: asyncio.Event) -> None:
        self.results: deque[StepResult] = deque()
        """Those that nobody has looked at, oldest first."""
        self.draining = False
        """The verifier wants no new requests."""
        self.broken: DSparkError | None = None
        """Why nothing will come any more."""
        self._stream = stream
        self._ttl_s = ttl_s
        self._wake = wake

    @property
    def verifier_id(self) -> str:
        """Member id of the verifier."""
        return self._stream.peer.member_id

    @property
    def takes_requests(self) -> bool:
        """Whether new ones may go there."""
        return not self.draining and self.broken is None

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[FrameStream]:
        """The stream, read and kept alive; closed at the end."""
        tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._keep_lease())]
        try:
            yield self._stream
        except FrameError as error:
            await self._stream.refuse(error)
            raise
        finally:
            self.broken = self.broken or Unavailable("the lane is closed")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._stream.close()

    def raise_if_broken(self) -> None:
        """Raises:
        DSparkError: the stream is over.
        """
        if self.broken is not None:
            raise self.broken

    async def _read(self) -> None:
        try:
            while True:
                frame = await self._stream.recv()
                if isinstance(frame, StepResult):
                    self.results.append(frame)
                elif isinstance(frame, Drain):
                    self.draining = True
                elif isinstance(frame, Refused):
                    raise error_for(frame.code, frame.message)
                elif isinstance(frame, Ping):
                    self._stream.try_send(Pong(nonce=frame.nonce))
                elif not isinstance(frame, Pong):
                    raise FrameError(f"a verifier sent {type(frame).__name__}")
                self._wake.set()
        except DSparkError as error:
            self.broken = error
            self._wake.set()

    async def _keep_lease(self) -> None:
        """Any frame renews the lease; a ping does when there are no steps."""
        for nonce in range(1 << 62):
            self._stream.try_send(Ping(nonce=nonce))
            await asyncio.sleep(self._ttl_s / _PINGS_PER_TTL)
