"""A router's side of what another one asks over one stream: requests it lends, and profiles."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass

from cluster.errors import DSparkError, FrameError, ModelNotFound
from cluster.streams import FrameStream
from cluster.wire import AskProfile, Cancel, Ping, Pong, Profile, Submit
from router.profile_report import Report
from router.relay import emit_of, request_of
from router.request import Delta
from router.service import RequestService
from router.ticket import Ticket

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Job:
    """A request in our hands."""

    task: asyncio.Task[None]
    """Sends its events."""
    ticket: Ticket


class PeerServer:
    """One stream that another router opened. When it ends, its requests are cancelled.

    Args:
        stream: with the Hellos exchanged; closed by the caller.
        service: serves the requests like any others, but never lends them on.
        report: what this router knows of its verifiers and drafters now.
    """

    def __init__(
        self, stream: FrameStream, service: RequestService, report: Callable[[], Report]
    ) -> None:
        self._stream = stream
        self._service = service
        self._report = report
        self._jobs: dict[str, _Job] = {}
        """By request id."""

    async def run(self) -> None:
        """Serve until the stream ends.

        Raises:
            Unavailable: it has ended.
            FrameError: a frame that a router does not send here.
        """
        try:
            while True:
                frame = await self._stream.recv()
                if isinstance(frame, Submit):
                    await self._submit(frame)
                elif isinstance(frame, Cancel):
                    await self._cancel(frame.request_id)
                elif isinstance(frame, Ping):
                    await self._stream.send(Pong(nonce=frame.nonce))
                elif isinstance(frame, AskProfile):
                    text = json.dumps(self._report(), allow_nan=False)
                    await self._stream.send(Profile(nonce=frame.nonce, json=text))
                elif not isinstance(frame, Pong):
                    raise FrameError(f"a router sent {type(frame).__name__}")
        finally:
            tasks = [job.task for job in self._jobs.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _submit(self, submit: Submit) -> None:
        request_id = submit.request_id
        job = self._jobs.get(request_id)
        if job is not None and job.ticket.done:  # the id comes again: let the first one end
            await asyncio.wait({job.task})
        try:
            ticket = self._service.admit(request_of(submit), lent=submit)
        except DSparkError as error:
            await self._stream.send(emit_of(request_id, submit.loan, 0, error))
            return

        def over(_: asyncio.Task[None]) -> None:
            del self._jobs[request_id]
            self._service.close(ticket)

        emitting = self._emit_all(ticket, submit.loan)
        task = asyncio.create_task(emitting, name=f"emit {request_id}")
        task.add_done_callback(over)
        self._jobs[request_id] = _Job(task=task, ticket=ticket)

    async def _cancel(self, request_id: str) -> None:
        """Cancel; a request that came over this stream answers with its own last `Emit`."""
        event: Delta | DSparkError = Delta(finish_reason="cancelled")
        if not self._service.cancel_here(request_id):
            event = ModelNotFound(f"no request {request_id!r} here")
        if request_id not in self._jobs:
            await self._stream.send(emit_of(request_id, 0, 0, event))

    async def _emit_all(self, ticket: Ticket, loan: int) -> None:
        """Send a request's events to the router that lends it, the last one included."""
        request_id = ticket.request.request_id
        event: Delta | DSparkError = Delta()
        seq = 0
        while not (isinstance(event, DSparkError) or event.finish_reason):
            try:
                event = await ticket.next()
            except DSparkError as error:
                event = error
            try:
                await self._stream.send(emit_of(request_id, loan, seq, event))
            except DSparkError as error:
                logger.info("request %s: its router is gone: %s", request_id, error)
                return
            seq += 1
