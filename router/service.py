"""The requests of a router: admitted, placed, streamed, ended exactly once.

`RequestService` holds every live ticket. A ticket waits in line, or is in a lane, or is lent to
another router; whenever lane or router lose it, it comes back to the head of the line with what it
has emitted, and the next lane goes on from there. The client's stream notices a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

from cluster.config import RouterConfig
from cluster.errors import DeadlineExceeded, DSparkError, InvalidRequest, Overloaded, Unavailable
from cluster.wire import Submit
from router.admission import ModelLimits, check_request
from router.detokenizer import Tokenizer
from router.lane import Lane
from router.outcomes import Outcomes
from router.relay import Relay
from router.request import Delta, GenerateRequest
from router.ticket import Ticket
from router.waiting_line import WaitingLine

logger = logging.getLogger(__name__)

MAX_RETURNS: Final = 5
"""A request that lost its lane so often without a token in between ends with Unavailable: it may
be what kills them."""


class RequestService:
    """Everything between a client's request and the lanes.

    Args:
        member_id: of the router; ids of requests that it admits may start with it and a slash.
        config: bounds of the queue, and how long a request without any verifier waits.
        limits: of the model; narrowed when a lease turns out to allow less.
        tokenizer: for text.
        lanes: by number; shared with `LanePool`, which adds and removes them.
        relay: to other routers.
        clock: seconds.
    """

    def __init__(
        self,
        *,
        member_id: str,
        config: RouterConfig,
        limits: ModelLimits,
        tokenizer: Tokenizer,
        lanes: Mapping[int, Lane],
        relay: Relay,
        clock: Callable[[], float],
    ) -> None:
        self.line = WaitingLine(config=config, limits=limits, lanes=lanes, relay=relay, clock=clock)
        """Requests without a lane, and where they go."""
        self.draining = False
        self._outcomes = Outcomes()
        self._member_id = member_id
        self._tokenizer = tokenizer
        self._lanes = lanes
        self._relay = relay
        self._clock = clock
        self._tickets: dict[str, Ticket] = {}
        self._closed = asyncio.Event()

    # --- the client's side --------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Stream a request's deltas; the last one has a ``finish_reason``. Closing the iterator
        cancels the request.

        Raises:
            DSparkError: the request was refused, or ended with this error.
        """
        ticket = self.admit(request)
        try:
            while True:
                delta = await ticket.next()
                yield delta
                if delta.finish_reason:
                    return
        finally:
            self.close(ticket)

    async def cancel(self, request_id: str) -> bool:
        """End a request with ``cancelled``, wherever it was submitted; whether it was running."""
        if request_id in self._tickets:
            return self.cancel_here(request_id)
        owner = request_id.partition("/")[0]
        if owner == self._member_id:
            return False
        peers = self.line.peers
        asked = [peers[owner]] if owner in peers else list(peers.values())
        return any(await asyncio.gather(*(self._relay.cancel(request_id, m) for m in asked)))

    def cancel_here(self, request_id: str) -> bool:
        """End a request of this router with ``cancelled``; whether it was running."""
        ticket = self._tickets.get(request_id)
        if ticket is None or ticket.done:
            return False
        self._end(ticket)
        return True

    # --- what is known ------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests without a lane."""
        return len(self.line)

    @property
    def num_live(self) -> int:
        """Requests whose stream is open."""
        return len(self._tickets)

    def figures(self) -> dict[str, float]:
        """Totals since start and gauges of now, flat."""
        return self._outcomes.figures() | {
            "queued": float(self.num_waiting),
            "live": float(self.num_live),
            "lent": float(self._relay.num_loans),
            "num_forwarded": float(self.line.num_forwarded),
        }

    # --- life of a ticket -----------------------------------------------------------------------

    def admit(self, request: GenerateRequest, *, lent: Submit | None = None) -> Ticket:
        """Take a request in; whoever reads the ticket's events calls `close` in the end.

        Args:
            lent: the frame that another router sent, which may carry tokens emitted elsewhere.

        Raises:
            DSparkError: refused, see `check_request` and `WaitingLine.push`.
        """
        if self.draining:
            raise Unavailable("this router is shutting down", hint="retry: another one will answer")
        max_new_tokens = check_request(request, self.line.limits)
        if request.request_id in self._tickets:
            raise InvalidRequest(
                f"request id {request.request_id!r} is in use", hint="send another, or none at all"
            )
        now = self._clock()
        ticket = Ticket(
            request,
            max_new_tokens=max_new_tokens,
            eos_ids=self.line.limits.eos_ids,
            tokenizer=self._tokenizer,
            now=now,
            emitted=() if lent is None else lent.ids[lent.num_prompt :].tolist(),
            num_sent_chars=0 if lent is None else lent.num_sent_chars,
        )
        self.line.push(ticket, lent_to_us=lent is not None)
        self._tickets[request.request_id] = ticket
        if ticket.deadline is not None:
            ticket.timer = asyncio.get_running_loop().call_later(
                ticket.deadline - now, self._expire, ticket
            )
        self.line.place()
        return ticket

    def _expire(self, ticket: Ticket) -> None:
        late = DeadlineExceeded(
            f"not finished within {ticket.request.deadline_s} s",
            hint=f"{ticket.num_emitted} tokens were sent",
        )
        self._end(ticket, late)

    def close(self, ticket: Ticket) -> None:
        """Its stream is over: read to the end, or closed early."""
        self._end(ticket)
        if ticket.timer is not None:
            ticket.timer.cancel()
        if self._tickets.get(ticket.request.request_id) is ticket:
            del self._tickets[ticket.request.request_id]
            self._closed.set()
        self.line.forget(ticket.request.request_id)
        self._outcomes.add(ticket)

    def _end(self, ticket: Ticket, error: DSparkError | None = None) -> None:
        """End a ticket from our side, with the error or as cancelled, and take it from wherever it
        is. A no-op once it is over."""
        if ticket.done:
            return
        if error is None:
            ticket.finish("cancelled")
        else:
            ticket.fail(error)
        self.line.remove(ticket)
        self._relay.drop(ticket)
        for lane in tuple(self._lanes.values()):
            lane.drop(ticket)
        self.line.place()

    def take_back(self, ticket: Ticket, reason: str) -> None:
        """Its lane gave up a request: it waits at the head of the line again."""
        ticket.num_returns += 1
        self._requeue(ticket, reason)

    def take_back_from(self, ticket: Ticket, peer_id: str, error: DSparkError) -> None:
        """Another router gave up a request, or refused it: leave that router alone for a while."""
        self.line.avoid(peer_id)
        ticket.restore()
        ticket.num_returns += not isinstance(error, Overloaded)
        self._requeue(ticket, str(error))

    def _requeue(self, ticket: Ticket, reason: str) -> None:
        if ticket.done:
            return
        logger.info("request %s returns: %s", ticket.request.request_id, reason)
        if self.draining or ticket.num_returns > MAX_RETURNS:
            ticket.fail(Unavailable(f"request lost its verifier: {reason}"))
        else:
            self.line.push_back(ticket)

    def shut(self) -> None:
        """Take nothing new from now on, and lend nothing."""
        self.draining = True
        self.line.lends = False

    async def drain(self, grace_s: float) -> None:
        """Take nothing new, let what runs finish for ``grace_s``, end the rest with Unavailable."""
        self.shut()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._tickets:
                    self._closed.clear()
                    await self._closed.wait()
        for ticket in tuple(self._tickets.values()):
            self._end(ticket, Unavailable("this router has shut down", hint="retry elsewhere"))
