"""Links to the drafter pool: one stream per drafter, dialled again for as long as it is listed.

Blocks go to the lane that owns the request; a request's id says which (`lane_number`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final, Protocol

from cluster.errors import DSparkError, FrameError, ProtocolMismatch, error_for
from cluster.members import Member
from cluster.streams import FrameStream, connect
from cluster.wire import Blocks, Drain, Frame, Hello, Lost, Ping, Pong, Refused
from router.blocks import DraftBlock, Malformed, read_blocks
from router.counters import LaneCounters
from router.drafter_book import DrafterBook, DrafterRef

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.1
_MAX_PAUSE_S: Final = 5.0
_RID_BITS: Final = 32


class DraftReceiver(Protocol):
    """A lane, as the links see it."""

    def take_block(self, drafter_id: str, block: DraftBlock | Malformed) -> None:
        """A block for one of its requests."""
        ...

    def lose_session(self, drafter_id: str, rid: int, epoch: int) -> None:
        """A session that the drafter no longer has."""
        ...

    def lose_drafter(self, drafter_id: str) -> None:
        """The drafter is gone."""
        ...


def request_ids(lane: int) -> Iterator[int]:
    """Ids for the requests of a lane: unique over lanes with different numbers."""
    return itertools.count(lane << _RID_BITS)


def lane_number(rid: int) -> int:
    """The lane whose `request_ids` gave this id."""
    return rid >> _RID_BITS


class DrafterPool:
    """Streams to all drafters that can draft for our verifiers.

    Args:
        hello: ours; drafters find the way back to us by its member id.
        book: where liveness is written.
        lanes: by number; shared with the node, which adds and removes them.
        counters: of the router.
        vocab_size: of the target, to check ids.
        connect_timeout_s: of one attempt.
    """

    def __init__(
        self,
        *,
        hello: Hello,
        book: DrafterBook,
        lanes: Mapping[int, DraftReceiver],
        counters: LaneCounters,
        vocab_size: int,
        connect_timeout_s: float,
    ) -> None:
        self._hello = hello
        self._book = book
        self._lanes = lanes
        self._counters = counters
        self._vocab_size = vocab_size
        self._connect_timeout_s = connect_timeout_s
        self._members: dict[str, Member] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def update(self, members: Iterable[Member], fingerprints: Collection[str]) -> None:
        """Follow the directory: dial what is new and matches one of the fingerprints."""
        self._members = {
            m.member_id: m for m in members if m.role == "drafter" and m.drafter in fingerprints
        }
        for member in self._members.values():
            self._book.set_load(member.member_id, member.load, draining=member.draining)
            if member.member_id not in self._tasks:
                self._tasks[member.member_id] = asyncio.create_task(
                    self._keep(member.member_id), name=f"drafter {member.member_id}"
                )

    async def stop(self) -> None:
        """Close all links."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, drafter_id: str) -> None:
        """Hold the link to one drafter while the directory lists it. An open one outlives that:
        the directory may err, the stream does not."""
        pause_s = _FIRST_PAUSE_S
        while member := self._members.get(drafter_id):
            opened = time.monotonic()
            try:
                await self._serve(member)
            except DSparkError as error:
                logger.info("drafter %s: %s", drafter_id, error)
            except Exception:  # a fault of ours must not cost us the drafter for good
                logger.exception("link to drafter %s failed", drafter_id)
            lasted_s = time.monotonic() - opened
            pause_s = _FIRST_PAUSE_S if lasted_s > _MAX_PAUSE_S else min(2 * pause_s, _MAX_PAUSE_S)
            await asyncio.sleep(pause_s)
        del self._tasks[drafter_id]

    async def _serve(self, member: Member) -> None:
        """One connection, from dialling to its end."""
        stream = await connect(
            member.address, self._hello, expect_role="drafter", timeout_s=self._connect_timeout_s
        )
        drafter_id = member.member_id
        try:
            _check_identity(stream.peer, member)
            ref = DrafterRef(
                drafter_id=drafter_id,
                address=member.address,
                fingerprint=member.drafter,
                device=member.device,
            )
            self._book.up(ref)
            while True:
                self._take(drafter_id, await stream.recv(), stream)
        except FrameError as error:
            self._counters.num_refused_frames += 1
            await stream.refuse(error)
            raise
        finally:
            self._book.down(drafter_id)
            for lane in tuple(self._lanes.values()):
                lane.lose_drafter(drafter_id)
            with contextlib.suppress(DSparkError):
                await stream.close()

    def _take(self, drafter_id: str, frame: Frame, stream: FrameStream) -> None:
        if isinstance(frame, Blocks):
            for block in read_blocks(frame, vocab_size=self._vocab_size):
                if lane := self._lanes.get(lane_number(block.rid)):
                    lane.take_block(drafter_id, block)
                else:
                    self._counters.stale["lane"] += 1
        elif isinstance(frame, Lost):
            for rid, epoch in zip(frame.rid.tolist(), frame.epoch.tolist(), strict=True):
                if lane := self._lanes.get(lane_number(rid)):
                    lane.lose_session(drafter_id, rid, epoch)
        elif isinstance(frame, Drain):
            self._book.set_load(drafter_id, 0.0, draining=True)
        elif isinstance(frame, Refused):
            raise error_for(frame.code, frame.message)
        elif isinstance(frame, Ping):
            stream.try_send(Pong(nonce=frame.nonce))
        elif not isinstance(frame, Pong):
            raise FrameError(f"a drafter sent {type(frame).__name__}")


def _check_identity(peer: Hello, member: Member) -> None:
    """Refuse a stranger at a listed address (a port that was reused).

    Raises:
        ProtocolMismatch: another member, or another checkpoint than listed.
    """
    if peer.member_id != member.member_id:
        raise ProtocolMismatch(f"{peer.member_id!r} answers for drafter {member.member_id!r}")
    if peer.drafter and peer.drafter != member.drafter:
        raise ProtocolMismatch(f"drafter {member.member_id!r} holds another checkpoint than listed")
