"""A lane: the whole round of one verifier, in reading order.

`Lane.run` is the loop that everything else serves:

    apply       what came back: commit, say what it means for each request, learn from it
    emit        tokens to their clients
    gather      wait until drafts are in, or late, or there is something better to do
    schedule    how much of each block to verify (paper section 3.2.2)
    dispatch    one `Step` frame out, while at most one other is being worked on

What is decided lies in `router.rounds` and `router.draft_lengths`, pure; here is the I/O around it.
Meanwhile the drafters get the new features from the verifier, and their blocks come in through
`take_block`, whatever the loop is doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from cluster.config import SchedulingConfig
from cluster.errors import Unavailable
from cluster.streams import FrameStream
from router.blocks import DraftBlock, Malformed
from router.lane_request import Emission, Failed, LaneRequest, Outcome
from router.placement import LaneLoad
from router.rounds import LaneState
from router.ticket import Ticket
from router.verifier_link import VerifierLink


class Lane:
    """The round loop of one verifier that this router holds the lease of.

    Args:
        number: of the lane; its request ids carry it.
        stream: to the verifier; the lane closes it.
        state: of the requests, made for the lease.
        rids: request ids that no other lane of this router, past or present, uses.
        step_timeout_s: a verifier that does not answer a step for this long is dead.
        on_change: called after each round: there may be room.
        on_return: called with a request that must be admitted anew, here or elsewhere, and why.
    """

    def __init__(
        self,
        *,
        number: int,
        stream: FrameStream,
        state: LaneState,
        rids: Iterator[int],
        step_timeout_s: float,
        on_change: Callable[[], None],
        on_return: Callable[[Ticket, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.number = number
        self.state = state
        self._stream = stream
        self._rids = rids
        self._step_timeout_s = step_timeout_s
        self._on_change = on_change
        self._on_return = on_return
        self._clock = clock
        self._tickets: dict[int, Ticket] = {}
        self._wake = asyncio.Event()
        self._link = VerifierLink(stream, ttl_s=state.lease.ttl_s, wake=self._wake)
        self._unanswered: deque[int] = deque()
        """Steps sent and not answered, oldest first."""
        self._awaited_since = 0.0
        """When the oldest of them was sent, or the one before it answered."""

    # --- the round ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Drive the verifier round by round until it is gone. `close` it then.

        Raises:
            DSparkError: why it ended.
        """
        async with self._link.open():
            while True:
                self._wake.clear()
                self._apply()
                self._link.raise_if_broken()
                now = self._clock()
                at = self.state.next_step_at(now)
                if at <= now:
                    await self._dispatch(now)
                else:
                    await self._sleep(min(at, self._answer_by), now)

    def _apply(self) -> None:
        """Account for the results that are in."""
        while self._link.results:
            now = self._clock()
            outcomes = self.state.apply(self._link.results.popleft(), now)
            self._unanswered.popleft()
            self._awaited_since = now
            self._emit(outcomes)

    async def _dispatch(self, now: float) -> None:
        """Form the step that goes now and send it."""
        rows = self.state.ready_rows(now)
        lengths = self.state.schedule(rows, now=now)
        step = self.state.dispatch(rows, lengths, now)
        if not self._unanswered:
            self._awaited_since = now
        self._unanswered.append(step.step_id)
        await self._stream.send(step)

    async def _sleep(self, until: float, now: float) -> None:
        """Wait for something to happen, at most until then.

        Raises:
            Unavailable: a step has not been answered in time.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if until == math.inf else until - now):
                await self._wake.wait()
        if self._clock() >= self._answer_by and not self._link.results:
            raise Unavailable(
                f"verifier {self.verifier_id!r} did not answer step {self._unanswered[0]} "
                f"in {self._step_timeout_s:.0f} s"
            )

    @property
    def _answer_by(self) -> float:
        """When the oldest step must be answered; its time runs from when it could start."""
        return self._awaited_since + self._step_timeout_s if self._unanswered else math.inf

    def _emit(self, outcomes: Sequence[Outcome]) -> None:
        """Hand each request what its round gave it."""
        for outcome in outcomes:
            ticket = self._tickets.get(outcome.rid)
            if ticket is None:
                continue  # ended a moment ago, by a stop string in an earlier row of this result
            if isinstance(outcome, Emission):
                if ticket.accept(outcome, self._clock()):
                    del self._tickets[outcome.rid]
                    self.state.end(outcome.rid)  # a stop string: the verifier does not know yet
            else:
                del self._tickets[outcome.rid]
                if isinstance(outcome, Failed):
                    ticket.fail(outcome.error)
                else:
                    self._on_return(ticket, outcome.reason)
        self._on_change()

    # --- requests and drafts come in while the loop runs ----------------------------------------

    @property
    def tickets(self) -> tuple[Ticket, ...]:
        """Requests in hand, oldest first."""
        return tuple(self._tickets.values())

    @property
    def verifier_id(self) -> str:
        """Member id of the verifier."""
        return self._link.verifier_id

    def close(self) -> tuple[Ticket, ...]:
        """The loop is over: give back the requests in hand, oldest first, and their drafters."""
        tickets = self.tickets
        for ticket in tickets:
            self.drop(ticket)
        return tickets

    def load(self, ticket: Ticket) -> LaneLoad:
        """How full the lane is, seen by this request."""
        return LaneLoad(
            lane_id=self.number,
            fits=not self._link.draining
            and self._link.broken is None
            and self.state.fits(ticket.max_len),
            num_requests=len(self.state.requests),
            max_requests=self.state.lease.max_requests,
        )

    @property
    def num_free_slots(self) -> int:
        """Requests that could start now, as far as their number goes."""
        free = self.state.lease.max_requests - len(self.state.requests)
        return 0 if self._link.draining else max(free, 0)

    def submit(self, ticket: Ticket) -> None:
        """Take a request that `load` said fits."""
        rid = next(self._rids)
        self._tickets[rid] = ticket
        request = LaneRequest(
            rid=rid,
            ids=list(ticket.ids),
            num_prompt=ticket.num_prompt,
            max_new_tokens=ticket.max_new_tokens,
            stop_ids=ticket.stop_ids,
            sampling=ticket.request.sampling,
            draft=ticket.request.draft,
            target_rate=ticket.request.target_rate,
            tier=ticket.request.tier,
            constraint_kind=ticket.request.constraint_kind,
            constraint=ticket.request.constraint,
            adapter=ticket.request.adapter,
            progress=ticket.progress,
        )
        self.state.add(request, self._clock())
        self._wake.set()

    def drop(self, ticket: Ticket) -> None:
        """The request is over: have the verifier free it. Unknown ones are ignored."""
        for rid in [rid for rid, other in self._tickets.items() if other is ticket]:
            del self._tickets[rid]
            self.state.end(rid)
            self._wake.set()

    def configure(self, scheduling: SchedulingConfig) -> None:
        """Decide like this from now on, also when the next step goes."""
        self.state.configure(scheduling)
        self._wake.set()

    def take_block(self, drafter_id: str, block: DraftBlock | Malformed) -> None:
        """A drafter sent a block for one of our requests."""
        self.state.take_block(drafter_id, block, self._clock())
        self._wake.set()

    def lose_session(self, drafter_id: str, rid: int, epoch: int) -> None:
        """A drafter lost a session."""
        self.state.lose_session(drafter_id, rid, epoch, self._clock())
        self._wake.set()

    def lose_drafter(self, drafter_id: str) -> None:
        """A drafter is gone."""
        self.state.lose_drafter(drafter_id, self._clock())
        self._wake.set()
