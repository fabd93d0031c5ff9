"""The requests of a router: admitted, placed, streamed, ended exactly once.

`RequestService` holds every live ticket. A ticket waits in the queue, or is in a lane, or is lent
to another router; whenever lane or router lose it, it comes back to the head of the queue with what
it has emitted, and the next lane goes on from there. The client's stream notices a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Final

from cluster.config import RouterConfig
from cluster.errors import (
    DeadlineExceeded,
    DSparkError,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    Unavailable,
)
from cluster.members import Member
from cluster.wire import Lease, Submit
from router.admission import ModelLimits, WaitingQueue, check_request
from router.detokenizer import Tokenizer
from router.lane import Lane
from router.placement import FREE_SLOTS, SLOTS, choose_lane, choose_peer
from router.relay import Relay
from router.request import Delta, GenerateRequest
from router.slo import Attainment
from router.ticket import Ticket

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
        lanes: by number; shared with the node, which adds and removes them.
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
        self.limits = limits
        self.peers: dict[str, Member] = {}
        """Other routers, as the directory lists them; free slots count down as we use them."""
        self.draining = False
        self.ended: Counter[str] = Counter()
        """Requests by how they ended: a finish reason or an error's name."""
        self.ttft_s = 0.0
        """Sum over requests of the time to the first token."""
        self.num_started = 0
        self.num_forwarded = 0
        self.attainment = Attainment()
        """Of requests with a target rate that were decoded here."""
        self._member_id = member_id
        self._config = config
        self._tokenizer = tokenizer
        self._lanes = lanes
        self._relay = relay
        self._clock = clock
        self._queue = WaitingQueue[Ticket](
            max_requests=config.max_queued_requests, max_tokens=config.max_queued_tokens
        )
        self._tickets: dict[str, Ticket] = {}
        self._lent_to_us: set[str] = set()
        """Request ids that another router lends us: never lent on."""
        self._avoided: set[str] = set()
        """Routers that refused or died since the last look at the directory."""
        self._alone_since: float | None = None
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
        asked = [self.peers[owner]] if owner in self.peers else list(self.peers.values())
        return any(await asyncio.gather(*(self._relay.cancel(request_id, m) for m in asked)))

    def cancel_here(self, request_id: str) -> bool:
        """End a request of this router with ``cancelled``; whether it was running."""
        ticket = self._tickets.get(request_id)
        if ticket is None or ticket.done:
            return False
        self._end(ticket)
        return True

    @property
    def num_waiting(self) -> int:
        """Requests without a lane."""
        return len(self._queue)

    @property
    def num_live(self) -> int:
        """Requests whose stream is open."""
        return len(self._tickets)

    # --- life of a ticket -----------------------------------------------------------------------

    def admit(self, request: GenerateRequest, *, lent: Submit | None = None) -> Ticket:
        """Take a request in; whoever reads the ticket's events calls `close` in the end.

        Args:
            lent: the frame that another router sent, which may carry tokens emitted elsewhere.

        Raises:
            DSparkError: refused, see `check_request` and `WaitingQueue.push`.
        """
        if self.draining:
            raise Unavailable("this router is shutting down", hint="retry: another one will answer")
        max_new_tokens = check_request(request, self.limits)
        if request.request_id in self._tickets:
            raise InvalidRequest(
                f"request id {request.request_id!r} is in use", hint="send another, or none at all"
            )
        now = self._clock()
        ticket = Ticket(
            request,
            max_new_tokens=max_new_tokens,
            eos_ids=self.limits.eos_ids,
            tokenizer=self._tokenizer,
            now=now,
            emitted=() if lent is None else lent.ids[lent.num_prompt :].tolist(),
            num_sent_chars=0 if lent is None else lent.num_sent_chars,
        )
        self._queue.push(ticket)
        self._tickets[request.request_id] = ticket
        if lent is not None:
            self._lent_to_us.add(request.request_id)
        if ticket.deadline is not None:
            ticket.timer = asyncio.get_running_loop().call_later(
                ticket.deadline - now, self._expire, ticket
            )
        self.place()
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
        self._lent_to_us.discard(ticket.request.request_id)
        self.ended[ticket.outcome] += 1
        if ticket.first_token_at is not None:
            self.num_started += 1
            self.ttft_s += ticket.first_token_at - ticket.submitted
            self.attainment.add(ticket.request.target_rate, ticket.progress)

    def _end(self, ticket: Ticket, error: DSparkError | None = None) -> None:
        """End a ticket from our side, with the error or as cancelled, and take it from wherever it
        is. A no-op once it is over."""
        if ticket.done:
            return
        if error is None:
            ticket.finish("cancelled")
        else:
            ticket.fail(error)
        self._queue.remove(ticket, self._clock())
        self._relay.drop(ticket)
        for lane in tuple(self._lanes.values()):
            lane.drop(ticket)
        self.place()

    def narrow(self, lease: Lease) -> None:
        """A verifier may take less than the configuration says: so do we, from now on."""
        room = min(lease.max_model_len, lease.kv_blocks * lease.kv_block_tokens)
        self.limits = replace(
            self.limits,
            max_model_len=min(self.limits.max_model_len, room),
            vocab_size=min(self.limits.vocab_size, lease.vocab_size),
        )

    def take_back(self, ticket: Ticket, reason: str) -> None:
        """Its lane gave up a request: it waits at the head of the queue again."""
        ticket.num_returns += 1
        self._requeue(ticket, reason)

    def take_back_from(self, ticket: Ticket, peer_id: str, error: DSparkError) -> None:
        """Another router gave up a request, or refused it: leave that router alone for a while."""
        self._avoided.add(peer_id)
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
            self._queue.push_front(ticket)

    # --- placement ------------------------------------------------------------------------------

    def place(self) -> None:
        """Give waiting requests a lane or another router, first come first served."""
        for ticket in self._queue:
            if not self._fit_model(ticket):
                continue
            lane = choose_lane([lane.load(ticket) for lane in self._lanes.values()])
            if lane is not None:
                self._queue.remove(ticket, self._clock())
                self._lanes[lane].submit(ticket)
            elif not self._lend(ticket):
                return

    def _fit_model(self, ticket: Ticket) -> bool:
        """Cut a request to what the leases turned out to allow; end it if that is too little."""
        room = self.limits.max_model_len - ticket.num_prompt
        ticket.max_new_tokens = min(ticket.max_new_tokens, max(room, 0))
        if ticket.max_new_tokens > ticket.num_emitted:
            return True
        limit = f"at most {self.limits.max_model_len} positions here"
        too_long = PromptTooLong(f"no room behind {len(ticket.ids)} tokens", hint=limit)
        ticket.fail(too_long)
        self._queue.remove(ticket, self._clock())
        return False

    def _lend(self, ticket: Ticket) -> bool:
        if ticket.request.request_id in self._lent_to_us or self.draining:
            return False
        peer = choose_peer(self.peers.values(), avoid=self._avoided)
        if peer is None:
            return False
        details = {**peer.details, FREE_SLOTS: peer.details[FREE_SLOTS] - 1}
        self.peers[peer.member_id] = replace(peer, details=details)
        self._queue.remove(ticket, self._clock())
        self.num_forwarded += 1
        self._relay.forward(ticket, peer, self._clock())
        return True

    def look(self, peers: Mapping[str, Member]) -> None:
        """Fresh news from the directory; requests that no verifier can serve for too long end."""
        self.peers = dict(peers)
        self._avoided.clear()
        now = self._clock()
        if self._lanes or any(peer.details.get(SLOTS, 0.0) for peer in peers.values()):
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        elif now - self._alone_since > self._config.unplaced_timeout_s:
            for ticket in self._queue:
                gone = Unavailable("no verifier in the cluster", hint="see the verifier pool")
                self._end(ticket, gone)
        self.place()

    async def drain(self, grace_s: float) -> None:
        """Take nothing new, let what runs finish for ``grace_s``, end the rest with Unavailable."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._tickets:
                    self._closed.clear()
                    await self._closed.wait()
        for ticket in tuple(self._tickets.values()):
            self._end(ticket, Unavailable("this router has shut down", hint="retry elsewhere"))
