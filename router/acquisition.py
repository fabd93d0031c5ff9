"""Opening a lane: dial a verifier, check that it is the right one, get the lease of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from cluster.config import Config
from cluster.errors import FrameError, ProtocolMismatch, Unavailable, error_for
from cluster.fingerprint import check_profile_fingerprint
from cluster.members import Member
from cluster.streams import FrameStream, check_models, connect
from cluster.wire import Acquire, Hello, Lease, Refused
from router.counters import LaneCounters
from router.drafter_book import DrafterBook
from router.drafters import request_ids
from router.lane import Lane
from router.lane_setup import lane_state
from router.recalibration import RecalibratorBook
from router.ticket import Ticket


async def open_lane(
    member: Member,
    *,
    numbers: Iterator[int],
    hello: Hello,
    config: Config,
    book: DrafterBook,
    counters: LaneCounters,
    recalibrators: RecalibratorBook,
    on_change: Callable[[], None],
    on_return: Callable[[Ticket, str], None],
) -> Lane:
    """A lane over this verifier, ready to run.

    Args:
        numbers: of lanes, none used before by this router; a lane takes one when it is leased.

    Raises:
        DSparkError: the verifier is not to be had: leased to another router, gone, not of our
            model, or without a usable profile.
    """
    timeout_s = config.cluster.connect_timeout_s
    stream = await connect(member.address, hello, expect_role="verifier", timeout_s=timeout_s)
    try:
        check_models(hello, stream.peer)
        if stream.peer.member_id != member.member_id:
            raise ProtocolMismatch(
                f"{stream.peer.member_id!r} answers for verifier {member.member_id!r}"
            )
        lease = await _acquire(stream, lane_id=hello.member_id, timeout_s=timeout_s)
        check_profile_fingerprint(lease.profile_fingerprint, stream.peer.model)
        state = lane_state(
            lease,
            fingerprint=member.drafter,
            config=config.router,
            book=book,
            counters=counters,
            recalibrators=recalibrators,
            device=member.device,
        )
    except BaseException:
        await stream.close()
        raise
    number = next(numbers)
    return Lane(
        number=number,
        stream=stream,
        state=state,
        rids=request_ids(number),
        step_timeout_s=config.router.step_timeout_s,
        on_change=on_change,
        on_return=on_return,
    )


async def _acquire(stream: FrameStream, *, lane_id: str, timeout_s: float) -> Lease:
    """Ask the verifier at the other end for the lease of itself.

    Raises:
        LeaseError: another router holds it.
        Unavailable: no answer.
        FrameError: an answer that is none.
    """
    await stream.send(Acquire(lane_id=lane_id))
    try:
        async with asyncio.timeout(timeout_s):
            answer = await stream.recv()
    except TimeoutError:
        raise Unavailable(f"no lease from {stream.peer.member_id!r} in {timeout_s} s") from None
    if isinstance(answer, Refused):
        raise error_for(answer.code, answer.message)
    if not isinstance(answer, Lease):
        raise FrameError(f"{type(answer).__name__} in answer to Acquire")
    if min(answer.max_requests, answer.max_step_tokens, answer.kv_block_tokens) < 1:
        raise FrameError("a lease of a verifier that can hold nothing")
    if not answer.ttl_s > 0:
        raise FrameError(f"a lease of {answer.ttl_s} s")
    return answer
