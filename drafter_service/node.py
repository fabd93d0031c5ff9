"""A drafter replica: streams of verifiers and routers around one `Drafter`.

The road of a block:

1. A verifier's stream brings `Open` and `Commit` frames; each is checked and queued.
2. The drafting loop takes everything that waits, of all lanes, as one batch.
3. One worker thread runs it (`Drafter.run`).
4. `Blocks` go to the stream that each lane's router keeps open to this replica, one frame a lane;
   `Lost` goes there and to the verifier that fed the session.

A lane without a stream loses its blocks (counted): drafts are hints, the lane decodes plainly.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import torch

from cluster.config import Config
from cluster.directory import Heartbeat
from cluster.errors import DSparkError, FrameError, Unavailable
from cluster.members import Directory, Member
from cluster.streams import DataServer, FrameStream, StreamLimits, check_models
from cluster.wire import Commit, Drain, Frame, Hello, Open, Ping, Pong, Refused, Release
from drafter_service.drafter import Drafter, DraftOutcome, HangUp, Work
from drafter_service.frame_checks import check_commit, check_open
from drafter_service.replies import blocks_by_lane, lost_by_owner
from drafter_service.sessions import LostSession
from drafter_service.work_queue import Batch, WorkQueue

logger = logging.getLogger(__name__)

_MAX_QUEUED_BYTES: Final = 64 << 20
_MAX_BATCH_ROWS: Final = 2048
_LEAST_EXPIRY_PERIOD_S: Final = 0.05
# What waits to be drafted waits in our own queue; a stream holds a few frames beside it.
_STREAM_LIMITS: Final = StreamLimits(max_frames=256, max_bytes=8 << 20)


@dataclass(slots=True, kw_only=True)
class NodeCounters:
    """What this replica did so far."""

    batches: int = 0
    blocks: int = 0
    """Drafted."""
    blocks_dropped: int = 0
    """Drafted for a lane without a stream, or with a full one."""
    sessions_lost: int = 0
    refused: int = 0
    """Frames refused, of streams that ended by it or not."""
    failed_batches: int = 0
    """Batches in which the drafter raised."""


class DrafterNode:
    """Serves one `Drafter` until `stop`.

    Args:
        member_id: of this replica, unique in the cluster.
        engine: what drafts; from now on called by this node only, from one thread.
        config: sections ``drafter`` (batching window, threads) and ``cluster``.
        directory: where to register.
        model: fingerprint of the target; a peer that names another one is refused.
        drafter: fingerprint of the drafter checkpoint; likewise.
        device: identity of what the engine computes on, see `cluster.device_identity`.
        host: interface to bind and advertise; `ClusterConfig.data_host` goes before it.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        member_id: str,
        engine: Drafter,
        config: Config,
        directory: Directory,
        model: str = "",
        drafter: str = "",
        device: str = "",
        host: str = "127.0.0.1",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.member_id = member_id
        self.counters = NodeCounters()
        self._engine = engine
        self._config = config.drafter
        self._device = device
        self._clock = clock
        self._hello = Hello(
            role="drafter",
            member_id=member_id,
            incarnation=time.time_ns(),
            model=model,
            drafter=drafter,
            token=config.cluster.auth_token,
        )
        self._server = DataServer(
            hello=self._hello,
            on_stream=self._serve,
            host=config.cluster.data_host or host,
            accept_roles=frozenset({"router", "verifier", "probe"}),
            limits=_STREAM_LIMITS,
        )
        self._heartbeat = Heartbeat(directory, self.describe, period_s=config.cluster.heartbeat_s)
        self._queue = WorkQueue(max_bytes=_MAX_QUEUED_BYTES, max_rows=_MAX_BATCH_ROWS)
        self._routers: dict[str, FrameStream] = {}
        self._verifiers: dict[int, FrameStream] = {}
        self._numbers = itertools.count(1)
        self._thread: ThreadPoolExecutor | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._draining = False
        self._empty = asyncio.Event()  # no session is held
        self._empty.set()

    @property
    def address(self) -> str:
        """``host:port`` to dial; only after `start`."""
        return self._server.address

    @property
    def num_sessions(self) -> int:
        """Draft sessions held."""
        return self._engine.num_sessions

    async def start(self) -> None:
        """Listen, draft, and register.

        Raises:
            Unavailable: the address cannot be bound.
        """
        threads = self._config.num_threads
        self._thread = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="draft",
            # OpenMP keeps the number per calling thread, so it is set in the one that computes.
            initializer=(lambda: torch.set_num_threads(threads)) if threads else None,
        )
        await self._server.start()
        self._loop_task = asyncio.create_task(self._draft_for_ever(), name="drafting")
        self._heartbeat.start()

    def check_health(self) -> None:
        """For the platform's health check.

        Raises:
            Unavailable: the drafting loop has died; only a restart helps.
        """
        if self._loop_task is not None and self._loop_task.done():
            raise Unavailable(f"the drafting loop of {self.member_id} is dead")

    def drain(self, deadline_s: float) -> None:
        """Take no new sessions from now on, and say so; those that run go on."""
        self._draining = True
        self._heartbeat.beat_now()
        for stream in (*self._routers.values(), *self._verifiers.values()):
            stream.try_send(Drain(deadline_s=deadline_s))

    async def stop(self, grace_s: float = 1.0) -> None:
        """Drain for up to ``grace_s``, then end all streams, the thread and the registration."""
        if self._loop_task is None:
            return
        self.drain(grace_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._empty.wait()
        await self._heartbeat.stop()
        await self._server.stop()
        task, self._loop_task = self._loop_task, None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None

    # --- streams ------------------------------------------------------------------------------

    async def _serve(self, stream: FrameStream) -> None:
        """One accepted stream, until it ends. Errors raised here are refusals (`DataServer`)."""
        try:
            check_models(self._hello, stream.peer)
            if stream.peer.role == "verifier":
                await self._serve_verifier(stream)
            elif stream.peer.role == "router":
                await self._serve_router(stream)
            else:
                while True:
                    self._answer(stream, await stream.recv())
        except FrameError:
            self.counters.refused += 1
            raise

    async def _serve_router(self, stream: FrameStream) -> None:
        lane_id = stream.peer.member_id
        self._routers[lane_id] = stream  # the newest stream of a router is the one it reads
        try:
            while True:
                self._answer(stream, await stream.recv())
        finally:
            if self._routers.get(lane_id) is stream:
                del self._routers[lane_id]

    async def _serve_verifier(self, stream: FrameStream) -> None:
        owner = next(self._numbers)
        self._verifiers[owner] = stream
        try:
            while True:
                frame = await stream.recv()
                if isinstance(frame, Open):
                    await self._open(owner, stream, frame)
                elif isinstance(frame, Commit):
                    check_commit(frame, self._engine.limits)
                    await self._queue.put(Work(owner=owner, frame=frame), self._clock())
                elif isinstance(frame, Release):
                    await self._queue.put(Work(owner=owner, frame=frame), self._clock())
                else:
                    self._answer(stream, frame)
        finally:
            del self._verifiers[owner]
            self._queue.put_now(Work(owner=owner, frame=HangUp()), self._clock())

    async def _open(self, owner: int, stream: FrameStream, frame: Open) -> None:
        """Queue a new session; one that we cannot serve is answered with `Lost` at once."""
        reason = "this drafter is draining" if self._draining else ""
        try:
            check_open(frame, self._engine.limits)
        except DSparkError as error:
            self.counters.refused += 1
            await stream.refuse(error, fatal=False)
            reason = str(error)
        if not reason:
            await self._queue.put(Work(owner=owner, frame=frame), self._clock())
            return
        lost = LostSession(
            lane_id=frame.lane_id, rid=frame.rid, epoch=frame.epoch, owner=owner, reason=reason
        )
        self._report_lost((lost,))

    def _answer(self, stream: FrameStream, frame: Frame) -> None:
        """Frames that any peer may send.

        Raises:
            FrameError: it may not send this one.
        """
        if isinstance(frame, Ping):
            stream.try_send(Pong(nonce=frame.nonce))
        elif isinstance(frame, Refused):
            logger.warning("%s refused: %s", stream.peer.member_id, frame.message)
        elif not isinstance(frame, Pong | Drain):
            raise FrameError(f"a drafter takes no {type(frame).__name__} from a {stream.peer.role}")

    # --- drafting -----------------------------------------------------------------------------

    async def _draft_for_ever(self) -> None:
        period_s = max(self._config.idle_session_s / 4, _LEAST_EXPIRY_PERIOD_S)
        while True:
            if await self._queue.wait(period_s) and self._config.batch_window_s:
                await asyncio.sleep(self._config.batch_window_s)
            batch = await self._queue.take(self._clock())
            try:
                outcome = await self._run(batch)
                self._reply(outcome, batch)
            except Exception:  # one batch lost; the replica lives
                self.counters.failed_batches += 1
                logger.exception("a batch of %d frames failed", len(batch.work))

    async def _run(self, batch: Batch) -> DraftOutcome:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._engine.run, batch.work, self._clock())

    def _reply(self, outcome: DraftOutcome, batch: Batch) -> None:
        self.counters.batches += bool(batch.work)
        if self.num_sessions:
            self._empty.clear()
        else:
            self._empty.set()
        self.counters.blocks += len(outcome.drafted)
        draft_s = max(self._clock() - batch.oldest_s, 0.0)
        self._report_lost(outcome.lost)
        for lane_id, frame in blocks_by_lane(outcome, drafter_id=self.member_id, draft_s=draft_s):
            router = self._routers.get(lane_id)
            if router is None or not router.try_send(frame):
                self.counters.blocks_dropped += len(frame.rid)

    def _report_lost(self, lost: tuple[LostSession, ...]) -> None:
        self.counters.sessions_lost += len(lost)
        for owner, frame in lost_by_owner(lost):
            for stream in (self._verifiers.get(owner), self._routers.get(frame.lane_id)):
                if stream is not None:
                    stream.try_send(frame)

    def describe(self) -> Member:
        """This replica as it tells the directory."""
        return Member(
            member_id=self.member_id,
            role="drafter",
            address=self.address,
            incarnation=self._hello.incarnation,
            model=self._hello.model,
            drafter=self._hello.drafter,
            load=float(self.num_sessions),
            draining=self._draining,
            device=self._device,
            details={
                "queued_bytes": float(self._queue.num_bytes),
                "batches": float(self.counters.batches),
                "blocks": float(self.counters.blocks),
                "blocks_dropped": float(self.counters.blocks_dropped),
                "sessions_lost": float(self.counters.sessions_lost),
            }
            | {
                f"sessions_{name}": float(count)
                for name, count in dataclasses.asdict(self._engine.counters).items()
            },
        )
