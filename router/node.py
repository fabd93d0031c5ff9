"""A router replica: finds verifiers and drafters, keeps its lanes, answers for its requests.

Runs in one asyncio loop, with or without Ray. It looks at the directory once a heartbeat: takes its
share of free verifiers, follows the drafter pool, learns of other routers. All requests go through
`RouterNode.generate`; other routers' come in over the data plane.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator

from cluster.config import Config, SchedulingConfig
from cluster.directory import Heartbeat
from cluster.members import Directory, Member, Role
from cluster.streams import DataServer, FrameStream, check_models
from cluster.wire import Hello
from router.admission import ModelLimits
from router.counters import LaneCounters
from router.detokenizer import Tokenizer
from router.directory_watch import DirectoryWatch
from router.drafter_book import DrafterBook
from router.drafters import DrafterPool
from router.lane import Lane
from router.lane_pool import LanePool
from router.peer_server import PeerServer
from router.placement import FREE_SLOTS, SLOTS
from router.profile_report import Report, own_report
from router.profile_survey import survey
from router.recalibration import RecalibratorBook
from router.relay import Relay
from router.request import Delta, GenerateRequest
from router.service import RequestService
from router.shared_scheduling import SharedScheduling


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
        self._hello = Hello(
            role="router",
            member_id=member_id,
            incarnation=time.time_ns(),
            model=limits.fingerprint,
            drafter="",
            token=config.cluster.auth_token,
        )
        self._lanes: dict[int, Lane] = {}
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
        self._lane_pool = LanePool(
            hello=self._hello,
            config=config,
            lanes=self._lanes,
            scheduling=self._scheduling,
            book=self._book,
            counters=self.counters,
            recalibrators=self._recalibrators,
            service=self._service,
            on_change=self._on_lanes,
        )
        self._server = DataServer(
            hello=self._hello,
            on_stream=self._serve,
            host=config.cluster.data_host or host,
            accept_roles=frozenset({"router", "probe"}),
        )
        self._heartbeat = Heartbeat(directory, self.describe, period_s=config.cluster.heartbeat_s)
        self._watch = DirectoryWatch(
            directory, period_s=config.cluster.heartbeat_s, on_look=self._look
        )

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
        self._lane_pool.configure()
        self._heartbeat.beat_now()

    async def profiles(self) -> Report:
        """What all routers know of the speed of their verifiers and drafters, and which of them do
        not answer within ``cluster.connect_timeout_s``; see `router.profile_report`."""
        return await survey(
            self._own_report(),
            self._watch.members,
            hello=self._hello,
            timeout_s=self._config.cluster.connect_timeout_s,
        )

    def _own_report(self) -> Report:
        return own_report(self.member_id, self._lanes.values(), self._book)

    # --- life ---------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """``host:port`` of the data plane; only after `start`."""
        return self._server.address

    @property
    def limits(self) -> ModelLimits:
        """Of the model, as far as the verifiers met so far allow."""
        return self._service.line.limits

    @property
    def is_serving(self) -> bool:
        """Whether requests find a lane from here, ours or another router's."""
        return self._service.line.is_served

    def num_members(self, role: Role) -> int:
        """Live members of the cluster, as the directory listed them last."""
        return self._watch.num_members(role)

    def describe(self) -> Member:
        """This replica as the directory should know it."""
        free = self._lane_pool.num_free_slots - self._service.num_waiting
        return Member(
            member_id=self.member_id,
            role="router",
            address=self.address,
            incarnation=self._hello.incarnation,
            model=self._hello.model,
            drafter="",
            load=float(self._service.num_live),
            draining=self._service.draining,
            details={
                FREE_SLOTS: float(max(free, 0)),
                SLOTS: float(self._lane_pool.num_slots),
                "lanes": float(len(self._lanes)),
                "queued": float(self._service.num_waiting),
            },
            scheduling=self._scheduling.announcement,
            scheduling_version=self._scheduling.version,
        )

    def check_health(self) -> None:
        """For the platform's health check.

        Raises:
            Unavailable: it no longer watches the directory; only a restart helps.
        """
        self._watch.check()

    def metrics(self) -> dict[str, float]:
        """Totals since start and gauges of now, flat."""
        figures = self.counters.snapshot() | self._lane_pool.figures() | self._service.figures()
        for drafter_id, num_bound in self._book.num_bound().items():
            figures[f"sessions.{drafter_id}"] = float(num_bound)
        figures |= {f"confidence.{k}": v for k, v in self._recalibrators.figures().items()}
        return figures | self._watch.figures()

    async def start(self) -> None:
        """Listen, register, start looking for verifiers.

        Raises:
            Unavailable: the address cannot be bound.
        """
        await self._server.start()
        self._heartbeat.start()
        self._watch.start()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Take nothing new, finish what runs within ``grace_s``, then leave. Idempotent."""
        self._service.shut()
        self._heartbeat.beat_now()
        await self._service.drain(grace_s)
        await self._watch.stop()
        await self._lane_pool.stop()
        await self._drafters.stop()
        await self._relay.stop()
        await self._heartbeat.stop()
        await self._server.stop()

    # --- the directory --------------------------------------------------------------------------

    def _look(self) -> None:
        """Act on what the directory lists now."""
        members = self._watch.members
        if self._scheduling.follow(members):
            self._lane_pool.configure()
            self._heartbeat.beat_now()
        if not self._service.draining:
            self._lane_pool.take(members)
        self._drafters.update(members, self._lane_pool.projections)
        self._service.line.look(self._watch.others(self.member_id))

    def _on_lanes(self) -> None:
        """A lane was won or lost: others act on it, drafters for it are linked."""
        self._drafters.update(self._watch.members, self._lane_pool.projections)
        self._heartbeat.beat_now()

    async def _serve(self, stream: FrameStream) -> None:
        """One stream that another router opened."""
        check_models(self._hello, stream.peer)
        await PeerServer(stream, self._service, self._own_report).run()
