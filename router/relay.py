"""Requests between routers: `Submit` to the owner of a better lane, `Emit` and `Cancel` back.

A router that owns no lane, or only full ones, keeps the client and lends the request. What comes
back is checked for gaps; if the owner dies or refuses, the request returns with what it has emitted
so far.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from cluster.errors import DSparkError, FrameError, Unavailable, error_for
from cluster.members import Member
from cluster.streams import FrameStream, connect
from cluster.wire import Cancel, Emit, Frame, Hello, Ping, Pong, Refused, Submit
from router.request import Delta, GenerateRequest
from router.ticket import Ticket

logger = logging.getLogger(__name__)

_RETURNED: Final = frozenset({"Overloaded", "Unavailable"})
"""Errors of the owner that say nothing about the request: another router may serve it."""


@dataclass(kw_only=True, eq=False)
class _Loan:
    """A request in another router's hands."""

    ticket: Ticket
    number: int
    """What the owner says carries it: of an earlier loan under the same id it may still speak."""
    next_seq: int = 0


@dataclass(kw_only=True, eq=False)
class _Peer:
    """Our stream to another router, or the attempt to open one."""

    member: Member
    stream: FrameStream | None = None
    unsent: list[Frame] = field(default_factory=list)
    loans: dict[str, _Loan] = field(default_factory=dict)
    cancels: dict[str, asyncio.Future[bool]] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None

    def send(self, frame: Frame) -> None:
        """Send, or keep until the stream is open.

        Raises:
            Unavailable: the peer does not keep up.
        """
        if self.stream is None:
            self.unsent.append(frame)
        elif not self.stream.try_send(frame):
            raise Unavailable(f"router {self.member.member_id!r} takes nothing")


class Relay:
    """Lends requests to other routers.

    Args:
        hello: ours.
        connect_timeout_s: of one attempt, and of a remote cancel.
        on_return: called with a request that the peer gave up, the peer's id and why.
    """

    def __init__(
        self,
        *,
        hello: Hello,
        connect_timeout_s: float,
        on_return: Callable[[Ticket, str, DSparkError], None],
    ) -> None:
        self._hello = hello
        self._connect_timeout_s = connect_timeout_s
        self._on_return = on_return
        self._peers: dict[str, _Peer] = {}
        self._loan_numbers = itertools.count(1)

    @property
    def num_loans(self) -> int:
        """Requests in other routers' hands."""
        return sum(len(peer.loans) for peer in self._peers.values())

    def forward(self, ticket: Ticket, member: Member, now: float) -> None:
        """Lend a request; its events arrive in the ticket as if it were served here."""
        peer = self._peer(member)
        loan = _Loan(ticket=ticket, number=next(self._loan_numbers))
        peer.loans[ticket.request.request_id] = loan
        self._send(peer, submit_of(ticket, now, loan=loan.number))

    def drop(self, ticket: Ticket) -> None:
        """The request is over on our side: say so to whoever has it."""
        request_id = ticket.request.request_id
        for peer in tuple(self._peers.values()):
            loan = peer.loans.get(request_id)
            if loan is not None and loan.ticket is ticket:
                del peer.loans[request_id]
                self._send(peer, Cancel(request_id=request_id))

    async def cancel(self, request_id: str, member: Member) -> bool:
        """Cancel a request at the router that admitted it; whether it was running there."""
        peer = self._peer(member)
        answer = peer.cancels.setdefault(request_id, asyncio.get_running_loop().create_future())
        self._send(peer, Cancel(request_id=request_id))
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                return await asyncio.shield(answer)
        except TimeoutError:
            return False
        finally:
            peer.cancels.pop(request_id, None)

    async def stop(self) -> None:
        """Close all streams; loans return."""
        tasks = [peer.task for peer in self._peers.values() if peer.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _peer(self, member: Member) -> _Peer:
        peer = self._peers.get(member.member_id)
        if peer is None:
            peer = self._peers[member.member_id] = _Peer(member=member)
            peer.task = asyncio.create_task(self._run(peer), name=f"router {member.member_id}")
        return peer

    def _send(self, peer: _Peer, frame: Frame) -> None:
        try:
            peer.send(frame)
        except DSparkError as error:
            logger.warning("router %s: %s", peer.member.member_id, error)
            if peer.task is not None:
                peer.task.cancel()  # its end returns the loans

    async def _run(self, peer: _Peer) -> None:
        """One connection, from dialling to its end, which returns what is still lent."""
        end: DSparkError = Unavailable("the relay is closed")
        stream = None
        try:
            stream = await connect(
                peer.member.address,
                self._hello,
                expect_role="router",
                timeout_s=self._connect_timeout_s,
            )
            for frame in peer.unsent:
                await stream.send(frame)
            peer.stream = stream
            while True:
                self._take(peer, await stream.recv())
        except DSparkError as error:
            end = error
            logger.info("router %s: %s", peer.member.member_id, error)
        finally:
            del self._peers[peer.member.member_id]
            for answer in peer.cancels.values():
                if not answer.done():
                    answer.set_result(False)
            for loan in peer.loans.values():
                self._on_return(loan.ticket, peer.member.member_id, end)
            if stream is not None:
                await stream.close()

    def _take(self, peer: _Peer, frame: Frame) -> None:
        if isinstance(frame, Emit):
            loan = peer.loans.get(frame.request_id)
            answer = peer.cancels.get(frame.request_id)
            if loan is not None and loan.number == frame.loan:
                self._take_emit(peer, loan, frame)
            elif frame.loan == 0 and answer is not None and not answer.done() and frame.finish:
                answer.set_result(frame.finish == "cancelled")
        elif isinstance(frame, Refused):
            raise error_for(frame.code, frame.message)
        elif isinstance(frame, Ping):
            peer.send(Pong(nonce=frame.nonce))
        elif not isinstance(frame, Pong):
            raise FrameError(f"a router sent {type(frame).__name__} in answer to Submit")

    def _take_emit(self, peer: _Peer, loan: _Loan, emit: Emit) -> None:
        if emit.seq != loan.next_seq:
            raise FrameError(f"request {emit.request_id!r}: Emit {emit.seq} after {loan.next_seq}")
        loan.next_seq += 1
        if emit.finish or emit.error_code:
            del peer.loans[emit.request_id]
        if emit.error_code in _RETURNED:
            error = error_for(emit.error_code, emit.error_message)
            self._on_return(loan.ticket, peer.member.member_id, error)
        else:
            loan.ticket.relay(emit)


def submit_of(ticket: Ticket, now: float, *, loan: int) -> Submit:
    """The request as it stands."""
    request = ticket.request
    return Submit(
        request_id=request.request_id,
        loan=loan,
        ids=np.array(ticket.ids, np.int32),
        num_prompt=ticket.num_prompt,
        num_sent_chars=ticket.num_sent_chars,
        max_new_tokens=ticket.max_new_tokens,
        stop_ids=np.array(request.stop_ids, np.int32),
        stop_strings=request.stop_strings,
        ignore_eos=request.ignore_eos,
        draft=request.draft,
        sampling=request.sampling,
        deadline_s=0.0 if ticket.deadline is None else max(ticket.deadline - now, 1e-3),
        target_rate=request.target_rate,
        tier=request.tier,
        constraint_kind=request.constraint_kind,
        constraint=request.constraint,
        adapter=request.adapter,
    )


def request_of(submit: Submit) -> GenerateRequest:
    """The request behind a `Submit`, without what it has emitted already.

    Raises:
        FrameError: ``num_prompt`` is not a length of its ids.
    """
    if not 1 <= submit.num_prompt <= len(submit.ids):
        raise FrameError(f"Submit: prompt of {submit.num_prompt} of {len(submit.ids)} ids")
    return GenerateRequest(
        request_id=submit.request_id,
        ids=tuple(submit.ids[: submit.num_prompt].tolist()),
        sampling=submit.sampling,
        max_new_tokens=submit.max_new_tokens,
        stop_ids=tuple(submit.stop_ids.tolist()),
        stop_strings=submit.stop_strings,
        ignore_eos=submit.ignore_eos,
        draft=submit.draft,
        deadline_s=submit.deadline_s or None,
        target_rate=submit.target_rate,
        tier=submit.tier,
        constraint_kind=submit.constraint_kind,
        constraint=submit.constraint,
        adapter=submit.adapter,
    )


def emit_of(request_id: str, loan: int, seq: int, event: Delta | DSparkError) -> Emit:
    """One event of a request that we serve for another router. Counts are totals so far."""
    delta = Delta(finish_reason="error") if isinstance(event, DSparkError) else event
    error = event if isinstance(event, DSparkError) else None
    return Emit(
        request_id=request_id,
        loan=loan,
        seq=seq,
        text=delta.text,
        token_ids=np.array(delta.token_ids, np.int32),
        logprobs=np.array(delta.logprobs, np.float32),
        finish=delta.finish_reason,
        error_code=type(error).__name__ if error else "",
        error_message=str(error)[:4096] if error else "",
        num_rounds=delta.usage.num_rounds,
        num_proposed=delta.usage.num_proposed,
        num_verified=delta.usage.num_verified,
        num_accepted=delta.usage.num_accepted,
    )
