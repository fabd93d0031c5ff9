"""A lane: the whole round of one verifier, in reading order.

`Lane.run` is the loop that everything else serves:

    gather      wait until drafts are in, or late, or there is something better to do
    schedule    how much of each block to verify (paper section 3.2.2, Algorithm 1)
    dispatch    one `Step` frame out
    exchange    one `StepResult` frame back
    apply       commit, say what the result means for each request, learn from it
    emit        tokens to their clients

What is decided lies in `router.rounds` and `router.draft_lengths`, pure; here is the I/O around it.
Meanwhile the drafters get the new features from the verifier, and their blocks come in through
`take_block`, whatever the loop is doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Final

from cluster.errors import DSparkError, FrameError, Unavailable, error_for
from cluster.streams import FrameStream
from cluster.wire import Drain, Ping, Pong, Refused, Step, StepResult
from router.blocks import DraftBlock, Malformed
from router.lane_request import Emission, Failed, LaneRequest, Outcome
from router.placement import LaneLoad
from router.rounds import LaneState
from router.ticket import Ticket

_PINGS_PER_TTL: Final = 3


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
        self.draining = False
        self._stream = stream
        self._rids = rids
        self._step_timeout_s = step_timeout_s
        self._on_change = on_change
        self._on_return = on_return
        self._clock = clock
        self._tickets: dict[int, Ticket] = {}
        self._wake = asyncio.Event()
        self._results: asyncio.Queue[StepResult] = asyncio.Queue()
        self._broken: DSparkError | None = None

    # --- the round ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Drive the verifier round by round until it is gone. `close` it then.

        Raises:
            DSparkError: why it ended.
        """
        async with self._companions():
            while True:
                rows = await self._gather()
                lengths = self.state.schedule(rows)
                step = self.state.dispatch(rows, lengths, self._clock())
                result = await self._exchange(step)
                outcomes = self.state.apply(result, self._clock())
                self._emit(outcomes)

    async def _gather(self) -> list[LaneRequest]:
        """Wait for the moment of the next step; its rows."""
        while True:
            self._raise_if_broken()
            self._wake.clear()
            now = self._clock()
            at = self.state.next_step_at(now)
            if at <= now:
                return self.state.ready_rows(now)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if at == math.inf else at - now):
                    await self._wake.wait()

    async def _exchange(self, step: Step) -> StepResult:
        """Send the step, wait for its result."""
        await self._stream.send(step)
        try:
            async with asyncio.timeout(self._step_timeout_s):
                while self._results.empty():
                    self._raise_if_broken()
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            raise Unavailable(
                f"verifier {self.verifier_id!r} did not answer step {step.step_id} "
                f"in {self._step_timeout_s:.0f} s"
            ) from None
        return self._results.get_nowait()

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
        return self._stream.peer.member_id

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
            fits=not self.draining and self._broken is None and self.state.fits(ticket.max_len),
            num_requests=len(self.state.requests),
            max_requests=self.state.lease.max_requests,
        )

    @property
    def num_free_slots(self) -> int:
        """Requests that could start now, as far as their number goes."""
        free = self.state.lease.max_requests - len(self.state.requests)
        return 0 if self.draining else max(free, 0)

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
        )
        self.state.add(request, self._clock())
        self._wake.set()

    def drop(self, ticket: Ticket) -> None:
        """The request is over: have the verifier free it. Unknown ones are ignored."""
        for rid in [rid for rid, other in self._tickets.items() if other is ticket]:
            del self._tickets[rid]
            self.state.end(rid)
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

    # --- stream -------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _companions(self) -> AsyncIterator[None]:
        """Reader and lease keeper beside the loop; the stream is closed at the end."""
        tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._keep_lease())]
        try:
            yield
        except FrameError as error:
            await self._stream.refuse(error)
            raise
        finally:
            self._broken = self._broken or Unavailable("the lane is closed")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._stream.close()

    async def _read(self) -> None:
        try:
            while True:
                frame = await self._stream.recv()
                if isinstance(frame, StepResult):
                    self._results.put_nowait(frame)
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
            self._broken = error
            self._wake.set()

    async def _keep_lease(self) -> None:
        """Any frame renews the lease; a ping does when there are no steps."""
        for nonce in range(1 << 62):
            self._stream.try_send(Ping(nonce=nonce))
            await asyncio.sleep(self.state.lease.ttl_s / _PINGS_PER_TTL)

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise self._broken
