"""Asks all routers of a cluster for their profiles, and names those that do not answer in time.

Each question has a stream of its own: whatever becomes of it, no lent request notices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from cluster.errors import DSparkError, FrameError, Unavailable, error_for
from cluster.members import Member
from cluster.streams import connect
from cluster.timeouts import require_timeout
from cluster.wire import AskProfile, Hello, Profile, Refused
from router.profile_report import Report, read_report, whole_report

_MAX_WHY: Final = 500
"""Characters of a reason."""


async def survey(
    own: Report, members: Sequence[Member], *, hello: Hello, timeout_s: float
) -> Report:
    """The report of all routers, see `whole_report`.

    Args:
        own: of the router that asks.
        members: of the cluster, as far as it knows.
        hello: its own.
        timeout_s: for all answers together; they are asked for at once.

    Raises:
        ConfigError: ``timeout_s`` <= 0.
    """
    require_timeout("timeout_s", timeout_s)
    peers = [m for m in members if m.role == "router" and m.member_id != own["router"]]
    answers = await asyncio.gather(*(_asked(peer, hello, timeout_s) for peer in peers))
    failures = {
        peer.member_id: str(answer)[:_MAX_WHY]
        for peer, answer in zip(peers, answers, strict=True)
        if isinstance(answer, DSparkError)
    }
    reports = [answer for answer in answers if not isinstance(answer, DSparkError)]
    return whole_report(own, reports, unanswered=failures, members=members)


async def _asked(peer: Member, hello: Hello, timeout_s: float) -> Report | DSparkError:
    """A router's own report, or why there is none."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _ask(peer, hello, timeout_s)
    except DSparkError as error:
        return error
    except TimeoutError:
        return Unavailable(f"no answer within {timeout_s:g} s")


async def _ask(peer: Member, hello: Hello, timeout_s: float) -> Report:
    stream = await connect(peer.address, hello, expect_role="router", timeout_s=timeout_s)
    try:
        await stream.send(AskProfile(nonce=1))
        frame = await stream.recv()
    finally:
        await stream.close()
    if isinstance(frame, Refused):
        raise error_for(frame.code, frame.message)
    if not isinstance(frame, Profile):
        raise FrameError(f"a router sent {type(frame).__name__} in answer to AskProfile")
    # Reading takes milliseconds for each verifier: not in the loop that drives the lanes.
    return await asyncio.to_thread(read_report, frame.json, peer.member_id)
