"""A router replica: finds verifiers and drafters, keeps its lanes, answers for its requests.

Runs in one asyncio loop, with or without Ray. It looks at the directory once a heartbeat: takes its
share of free verifiers, follows the drafter pool, learns of other routers. All requests go through
`RouterNode.generate`; other routers' come in over the data plane.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Final

from cluster.config import Config, SchedulingConfig
from cluster.directory import Heartbeat
from cluster.errors import DSparkError, Unavailable
from cluster.members import Directory, Member
from cluster.streams import DataServer, FrameStream, check_models
from cluster.wire import Hello
from router.acquisition import open_lane
from router.admission import ModelLimits
from router.counters import LaneCounters
from router.detokenizer import Tokenizer
from router.drafter_book import DrafterBook
from router.drafters import DrafterPool
from router.lane import Lane
from router.peer_server import PeerServer
from router.placement import FREE_SLOTS, SLOTS, verifiers_to_acquire
from router.profile_report import profile_report
from router.recalibration import RecalibratorBook
from router.relay import Relay
from router.request import Delta, GenerateRequest
from router.service import RequestService
from router.shared_scheduling import SharedScheduling

logger = logging.getLogger(__name__)

_LANE_NUMBERS: Final = 1 << 29


class RouterNode:
    """One replica. `start` it, and it serves until `stop`.

    Args:
        tokenizer: of the target, for text.
        limits: of the target model.
        host: interface to bind and advertise; `ClusterConfig.data_host` goes before it.
    """

    def __init__(
        self,
        *,
        member_id: str,
        config: Config,
        directory: Directory,
        tokenizer: Tokenizer,
        limits: ModelLimits,
        host: str = "127.0.0.1",
    ) -> None:
        self.member_id = member_id
        self.counters = LaneCounters()
        self._config = config
        self._directory = directory
        self._model = limits.fingerprint
        self._hello = Hello(
            role="router",
            member_id=member_id,
            incarnation=time.time_ns(),
            model=limits.fingerprint,
            drafter="",
            token=config.cluster.auth_token,
        )
        # Request ids must differ from those of an earlier life under the same member id.
        self._lane_numbers = itertools.count(time.time_ns() // 1_000_000_000 % _LANE_NUMBERS)
        self._lanes: dict[int, Lane] = {}
        self._drives: dict[str, asyncio.Task[None]] = {}
        """By verifier: the task that acquires it and runs its lane."""
        self._projections: dict[str, str] = {}
        """By verifier: fingerprint of the drafter projection that it holds."""
        self._members: tuple[Member, ...] = ()
        self._scheduling = SharedScheduling(config.router.scheduling)
        self._book = DrafterBook(config.router.draft_timeout_s)
        self._recalibrators = RecalibratorBook(enabled=config.router.scheduling.recalibrate)
        self._drafters = DrafterPool(
            hello=self._hello,
            book=self._book,
            lanes=self._lanes,
            counters=self.counters,
            vocab_size=limits.vocab_size,
            connect_timeout_s=config.cluster.connect_timeout_s,
        )
        self._relay = Relay(
            hello=self._hello,
            connect_timeout_s=config.cluster.connect_timeout_s,
            on_return=lambda ticket, peer, error: self._service.take_back_from(ticket, peer, error),
        )
        self._service = RequestService(
            member_id=member_id,
            config=config.router,
            limits=limits,
            tokenizer=tokenizer,
            lanes=self._lanes,
            relay=self._relay,
            clock=time.monotonic,
        )
        self._server = DataServer(
            hello=self._hello,
            on_stream=self._serve,
            host=config.cluster.data_host or host,
            accept_roles=frozenset({"router", "probe"}),
        )
        self._heartbeat = Heartbeat(directory, self.describe, period_s=config.cluster.heartbeat_s)
        self._watch: asyncio.Task[None] | None = None

    # --- requests -----------------------------------------------------------------------------

    def new_request_id(self) -> str:
        """An id that names this router, so that a cancel at any router finds its way."""
        return f"{self.member_id}/{uuid.uuid4().hex}"

    def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Stream a request's deltas, see `RequestService.generate`."""
        return self._service.generate(request)

    async def cancel(self, request_id: str) -> bool:
        """End a request with ``cancelled``, wherever it was submitted; whether it was running."""
        return await self._service.cancel(request_id)

    # --- scheduling ---------------------------------------------------------------------------

    @property
    def scheduling(self) -> SchedulingConfig:
        """What the lanes follow now."""
        return self._scheduling.current

    def configure(self, scheduling: SchedulingConfig) -> None:
        """Have all lanes follow this from their next step on, and tell the other routers."""
        self._scheduling.change(scheduling)
        self._configure_lanes()
        self._heartbeat.beat_now()

    def profiles(self) -> dict[str, Any]:
        """What is known of the speed of our verifiers and drafters, see `profile_report`."""
        return profile_report(self.member_id, self._lanes.values(), self._book)

    def _configure_lanes(self) -> None:
        self._recalibrators.switch(enabled=self.scheduling.recalibrate)
        for lane in self._lanes.values():
            lane.configure(self.scheduling)

    # --- life ---------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """``host:port`` of the data plane; only after `start`."""
        return self._server.address

    @property
    def limits(self) -> ModelLimits:
        """Of the model, as far as the verifiers met so far allow."""
        return self._service.limits

    def describe(self) -> Member:
        """This replica as the directory should know it."""
        free = sum(lane.num_free_slots for lane in self._lanes.values()) - self._service.num_waiting
        slots = sum(lane.state.lease.max_requests for lane in self._lanes.values())
        return Member(
            member_id=self.member_id,
            role="router",
            address=self.address,
            incarnation=self._hello.incarnation,
            model=self._model,
            drafter="",
            load=float(self._service.num_live),
            draining=self._service.draining,
            details={
                FREE_SLOTS: float(max(free, 0)),
                SLOTS: float(slots),
                "lanes": float(len(self._lanes)),
                "queued": float(self._service.num_waiting),
            },
            scheduling=self._scheduling.announcement,
            scheduling_version=self._scheduling.version,
        )

    def check_health(self) -> None:
        """For the platform's health check.

        Raises:
            Unavailable: the task that watches the directory has died; only a restart helps.
        """
        if self._watch is not None and self._watch.done():
            raise Unavailable(f"router {self.member_id!r} no longer watches the directory")

    def metrics(self) -> dict[str, float]:
        """Totals since start and gauges of now, flat."""
        service = self._service
        figures = self.counters.snapshot() | {
            "lanes": float(len(self._lanes)),
            "in_lanes": float(sum(len(lane.tickets) for lane in self._lanes.values())),
            "queued": float(service.num_waiting),
            "live": float(service.num_live),
            "lent": float(self._relay.num_loans),
            "num_forwarded": float(service.num_forwarded),
            "num_started": float(service.num_started),
            "ttft_s": service.ttft_s,
        }
        figures |= {f"slo.{name}": value for name, value in service.attainment.figures().items()}
        figures |= {f"ended.{how}": float(n) for how, n in sorted(service.ended.items())}
        for drafter_id, num_bound in self._book.num_bound().items():
            figures[f"sessions.{drafter_id}"] = float(num_bound)
        for lane in self._lanes.values():
            for name, value in lane.state.profile.figures().items():
                figures[f"step_{name}.{lane.verifier_id}"] = value
            for name, value in lane.state.gate_figures().items():
                figures[f"gate_{name}.{lane.verifier_id}"] = value
        figures |= {f"confidence.{k}": v for k, v in self._recalibrators.figures().items()}
        for member in self._members:
            if member.role != "router":
                figures |= {
                    f"{member.role}.{member.member_id}.{k}": v for k, v in member.details.items()
                }
        return figures

    async def start(self) -> None:
        """Listen, register, start looking for verifiers.

        Raises:
            Unavailable: the address cannot be bound.
        """
        await self._server.start()
        self._heartbeat.start()
        self._watch = asyncio.create_task(self._watch_directory(), name="directory watch")

    async def stop(self, grace_s: float = 0.0) -> None:
        """Take nothing new, finish what runs within ``grace_s``, then leave. Idempotent."""
        self._service.draining = True
        self._heartbeat.beat_now()
        await self._service.drain(grace_s)
        tasks = [task for task in (self._watch, *self._drives.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._watch = None
        await self._drafters.stop()
        await self._relay.stop()
        await self._heartbeat.stop()
        await self._server.stop()

    # --- the directory --------------------------------------------------------------------------

    async def _watch_directory(self) -> None:
        while True:
            try:
                self._members = await self._directory.members()
            except Exception as error:  # a directory that misbehaves must not end a replica
                logger.warning("directory: %s; going on with what is known", error)
            if self._scheduling.follow(self._members):
                self._configure_lanes()
                self._heartbeat.beat_now()
            self._take_verifiers()
            self._drafters.update(self._members, set(self._projections.values()) - {""})
            self._service.look(
                {
                    m.member_id: m
                    for m in self._members
                    if m.role == "router" and m.member_id != self.member_id
                }
            )
            await asyncio.sleep(self._config.cluster.heartbeat_s)

    def _take_verifiers(self) -> None:
        """Try for our share of the free verifiers."""
        if self._service.draining:
            return
        wanted = verifiers_to_acquire(
            self._members, me=self.member_id, model=self._model, held=self._drives.keys()
        )
        for member in wanted:
            self._drives[member.member_id] = asyncio.create_task(
                self._drive(member), name=f"lane {member.member_id}"
            )

    async def _drive(self, member: Member) -> None:
        """Acquire one verifier and run its lane to the end; its requests come back."""
        lane = None
        reason = "the lane is closed"
        scheduling = self.scheduling
        router = replace(self._config.router, scheduling=scheduling)
        try:
            lane = await open_lane(
                member,
                numbers=self._lane_numbers,
                hello=self._hello,
                config=replace(self._config, router=router),
                book=self._book,
                counters=self.counters,
                recalibrators=self._recalibrators,
                on_change=self._service.place,
                on_return=self._service.take_back,
            )
            if self.scheduling != scheduling:  # changed meanwhile
                lane.configure(self.scheduling)
            self._service.narrow(lane.state.lease)
            self._lanes[lane.number] = lane
            self._projections[member.member_id] = member.drafter
            self._drafters.update(self._members, set(self._projections.values()) - {""})
            self._heartbeat.beat_now()
            self._service.place()
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
            self._heartbeat.beat_now()
            self._service.place()

    async def _serve(self, stream: FrameStream) -> None:
        """One stream that another router opened."""
        check_models(self._hello, stream.peer)
        await PeerServer(stream, self._service).run()
