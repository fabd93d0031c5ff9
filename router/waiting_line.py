"""Requests that have no lane: first come, first served, to a lane of ours or to another router."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from cluster.config import RouterConfig
from cluster.errors import PromptTooLong, Unavailable
from cluster.members import Member
from cluster.wire import Lease
from router.admission import ModelLimits, WaitingQueue
from router.lane import Lane
from router.placement import FREE_SLOTS, SLOTS, choose_lane, choose_peer
from router.relay import Relay
from router.ticket import Ticket


class WaitingLine:
    """Holds tickets until a lane or another router takes them.

    Args:
        config: bounds of the queue, and how long a request without any verifier waits.
        limits: of the model; narrowed when a lease turns out to allow less.
        lanes: by number; shared with `LanePool`, which adds and removes them.
        relay: to other routers.
        clock: seconds.
    """

    def __init__(
        self,
        *,
        config: RouterConfig,
        limits: ModelLimits,
        lanes: Mapping[int, Lane],
        relay: Relay,
        clock: Callable[[], float],
    ) -> None:
        self.limits = limits
        self.peers: dict[str, Member] = {}
        """Other routers, as the directory lists them; free slots count down as we use them."""
        self.lends = True
        """Whether requests may go to other routers."""
        self.num_forwarded = 0
        self._unplaced_timeout_s = config.unplaced_timeout_s
        self._lanes = lanes
        self._relay = relay
        self._clock = clock
        self._queue = WaitingQueue[Ticket](
            max_requests=config.max_queued_requests, max_tokens=config.max_queued_tokens
        )
        self._lent_to_us: set[str] = set()
        """Request ids that another router lends us: never lent on."""
        self._avoided: set[str] = set()
        """Routers that refused or died since the last look at the directory."""
        self._alone_since: float | None = None

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def is_served(self) -> bool:
        """Whether any lane is known that requests could go to, here or at another router."""
        return bool(self._lanes) or any(p.details.get(SLOTS, 0.0) for p in self.peers.values())

    def push(self, ticket: Ticket, *, lent_to_us: bool) -> None:
        """Take a new request.

        Raises:
            Overloaded: no room.
        """
        self._queue.push(ticket)
        if lent_to_us:
            self._lent_to_us.add(ticket.request.request_id)

    def push_back(self, ticket: Ticket) -> None:
        """Take a request that had a lane and lost it: it is the next one to get another."""
        self._queue.push_front(ticket)

    def remove(self, ticket: Ticket) -> None:
        """It has ended; a no-op if it does not wait."""
        self._queue.remove(ticket, self._clock())

    def forget(self, request_id: str) -> None:
        """The request is over for good, and its id may come again."""
        self._lent_to_us.discard(request_id)

    def avoid(self, peer_id: str) -> None:
        """That router refused or died: nothing for it before the next look at the directory."""
        self._avoided.add(peer_id)

    def narrow(self, lease: Lease) -> None:
        """A verifier may take less than the configuration says: so do we, from now on."""
        room = min(lease.max_model_len, lease.kv_blocks * lease.kv_block_tokens)
        self.limits = replace(
            self.limits,
            max_model_len=min(self.limits.max_model_len, room),
            vocab_size=min(self.limits.vocab_size, lease.vocab_size),
        )

    def look(self, peers: Mapping[str, Member]) -> None:
        """Fresh news from the directory; requests that no verifier can serve for too long end."""
        self.peers = dict(peers)
        self._avoided.clear()
        now = self._clock()
        if self.is_served:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        elif now - self._alone_since > self._unplaced_timeout_s:
            for ticket in self._queue:
                gone = Unavailable("no verifier in the cluster", hint="see the verifier pool")
                ticket.fail(gone)
                self._queue.remove(ticket, now)
        self.place()

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
        if ticket.request.request_id in self._lent_to_us or not self.lends:
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
