"""The verifiers that a router leads: acquired, each driven by a lane, and given up again."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from cluster.config import Config
from cluster.errors import DSparkError
from cluster.members import Member
from cluster.wire import Hello
from router.acquisition import open_lane
from router.counters import LaneCounters
from router.drafter_book import DrafterBook
from router.lane import Lane
from router.placement import verifiers_to_acquire
from router.recalibration import RecalibratorBook
from router.service import RequestService
from router.shared_scheduling import SharedScheduling

logger = logging.getLogger(__name__)

_LANE_NUMBERS: Final = 1 << 29


class LanePool:
    """Takes verifiers and runs their lanes, each in a task of its own.

    Args:
        hello: of the router.
        config: of the router; what lanes decide comes from ``scheduling``.
        lanes: by number; filled here, read by others.
        scheduling: that the router follows.
        book: drafters, shared by the lanes.
        counters: likewise.
        recalibrators: likewise.
        service: gives the lanes their requests, and takes them back.
        on_change: called when a lane was won or lost.
    """

    def __init__(
        self,
        *,
        hello: Hello,
        config: Config,
        lanes: dict[int, Lane],
        scheduling: SharedScheduling,
        book: DrafterBook,
        counters: LaneCounters,
        recalibrators: RecalibratorBook,
        service: RequestService,
        on_change: Callable[[], None],
    ) -> None:
        self._hello = hello
        self._config = config
        self._lanes = lanes
        self._scheduling = scheduling
        self._book = book
        self._counters = counters
        self._recalibrators = recalibrators
        self._service = service
        self._on_change = on_change
        # Request ids must differ from those of an earlier life under the same member id.
        self._numbers = itertools.count(time.time_ns() // 1_000_000_000 % _LANE_NUMBERS)
        self._drives: dict[str, asyncio.Task[None]] = {}
        """By verifier: the task that acquires it and runs its lane."""
        self._projections: dict[str, str] = {}
        """By verifier: fingerprint of the drafter projection that it holds."""

    @property
    def projections(self) -> set[str]:
        """Fingerprints of the drafters that can draft for our verifiers."""
        return set(self._projections.values()) - {""}

    @property
    def num_slots(self) -> int:
        """Requests that the lanes can hold."""
        return sum(lane.state.lease.max_requests for lane in self._lanes.values())

    @property
    def num_free_slots(self) -> int:
        """Requests that they could start now."""
        return sum(lane.num_free_slots for lane in self._lanes.values())

    def take(self, members: Iterable[Member]) -> None:
        """Try for our share of the free verifiers."""
        wanted = verifiers_to_acquire(
            members,
            me=self._hello.member_id,
            model=self._hello.model,
            held=self._drives.keys(),
        )
        for member in wanted:
            self._drives[member.member_id] = asyncio.create_task(
                self._drive(member), name=f"lane {member.member_id}"
            )

    def configure(self) -> None:
        """The scheduling has changed: all lanes follow it from their next step on."""
        current = self._scheduling.current
        self._recalibrators.switch(enabled=current.recalibrate)
        for lane in self._lanes.values():
            lane.configure(current)

    def figures(self) -> dict[str, float]:
        """Gauges of now, flat."""
        lanes = self._lanes.values()
        figures = {
            "lanes": float(len(lanes)),
            "in_lanes": float(sum(len(lane.tickets) for lane in lanes)),
        }
        for lane in lanes:
            for name, value in lane.state.profile.figures().items():
                figures[f"step_{name}.{lane.verifier_id}"] = value
            for name, value in lane.state.gate_figures().items():
                figures[f"gate_{name}.{lane.verifier_id}"] = value
        return figures

    async def stop(self) -> None:
        """Give all verifiers up; their requests return. Idempotent."""
        tasks = tuple(self._drives.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _drive(self, member: Member) -> None:
        """Acquire one verifier and run its lane to the end; its requests come back."""
        lane = None
        reason = "the lane is closed"
        try:
            lane = await self._open(member)
            self._service.line.narrow(lane.state.lease)
            self._lanes[lane.number] = lane
            self._projections[member.member_id] = member.drafter
            self._on_change()
            self._service.line.place()
            await lane.run()
        except DSparkError as error:
            reason = str(error)
            logger.info("verifier %s: %s", member.member_id, error)
        except Exception as error:  # a fault of ours: the requests go on elsewhere
            reason = f"internal error: {type(error).__name__}"
            logger.exception("the lane of verifier %s failed", member.member_id)
        finally:
            self._projections.pop(member.member_id, None)
            del self._drives[member.member_id]
            if lane is not None:
                self._lanes.pop(lane.number, None)
                for ticket in reversed(lane.close()):
                    self._service.take_back(ticket, reason)
            self._on_change()
            self._service.line.place()

    async def _open(self, member: Member) -> Lane:
        scheduling = self._scheduling.current
        router = replace(self._config.router, scheduling=scheduling)
        lane = await open_lane(
            member,
            numbers=self._numbers,
            hello=self._hello,
            config=replace(self._config, router=router),
            book=self._book,
            counters=self._counters,
            recalibrators=self._recalibrators,
            on_change=self._service.line.place,
            on_return=self._service.take_back,
        )
        if self._scheduling.current != scheduling:  # changed meanwhile
            lane.configure(self._scheduling.current)
        return lane
