"""A verifier replica: grants the lease of itself, takes steps from its holder, feeds the drafters.

Runs in one asyncio loop, with or without Ray. Frames from a router: `Acquire` gives it the lease or
a refusal; `Step` (from the holder only) is queued, one ahead of the one that runs; `Ping` is
answered; any frame of the holder renews its lease. When the holder's stream ends or it falls
silent for the lease's time, everything it had here is freed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import numpy as np

from cluster.config import Config
from cluster.directory import Heartbeat
from cluster.errors import DSparkError, FrameError, LeaseError, Overloaded, Unavailable
from cluster.members import Directory, Member
from cluster.streams import DataServer, FrameStream, StreamCounters, check_models
from cluster.wire import Acquire, Drain, Frame, Hello, Lease, Ping, Pong, Refused, Step
from verifier_service.draft_links import DraftLinks
from verifier_service.engine import Engine
from verifier_service.feature_cache import FeatureCache
from verifier_service.lease import LeaseState
from verifier_service.profiling import (
    StepProfile,
    check_profile,
    fingerprint_of,
    measure_profile,
)
from verifier_service.step_runner import StepRunner

logger = logging.getLogger(__name__)

MAX_STEPS_IN_HAND = 2
"""One runs, one waits."""
MOST_CRASHES = 3
"""Steps that fail one after the other before the engine is taken for dead."""


class VerifierNode:
    """One replica. `start` it, and it serves until `stop`.

    Args:
        engine: loaded, holding no request; from now on called by this node only.
        drafter: fingerprint of the projection that the engine holds, empty for none.
        device: identity of what the engine computes on, see `cluster.device_identity`.
        host: interface to bind and advertise; `ClusterConfig.data_host` goes before it.
        profile: a step profile measured earlier; measured at `start` if not given.
        prepare: called in the engine's thread before anything else, to set the thread up.
    """

    def __init__(
        self,
        *,
        member_id: str,
        engine: Engine,
        config: Config,
        directory: Directory,
        drafter: str = "",
        device: str = "",
        host: str = "127.0.0.1",
        profile: StepProfile | None = None,
        prepare: Callable[[], object] | None = None,
    ) -> None:
        self.member_id = member_id
        self.profile = profile
        self._engine = engine
        self._device = device
        self._config = config
        self._hello = Hello(
            role="verifier",
            member_id=member_id,
            incarnation=time.time_ns(),
            model=engine.limits.model_fingerprint,
            drafter=drafter,
            token=config.cluster.auth_token,
        )
        self._server = DataServer(
            hello=self._hello,
            on_stream=self._serve,
            host=config.cluster.data_host or host,
            accept_roles=frozenset({"router", "probe"}),
        )
        self._heartbeat = Heartbeat(directory, self.describe, period_s=config.cluster.heartbeat_s)
        self._lease = LeaseState(
            ttl_s=config.verifier.lease_ttl_s, incarnation=self._hello.incarnation
        )
        self._lease_changed = asyncio.Event()
        self._holder: FrameStream | None = None
        self._steps: asyncio.Queue[Step] = asyncio.Queue()
        """Bounded by `_take`: one runs, one waits."""
        self._step_began_s: float | None = None
        """When the step that is running was taken; None between steps."""
        self._draining = False
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self.links = DraftLinks(
            hello=self._hello,
            queue_bytes=config.verifier.link_queue_bytes,
            connect_timeout_s=config.cluster.connect_timeout_s,
        )
        self.cache = FeatureCache(config.verifier.feature_cache_bytes)
        self._runner = StepRunner(engine, self.links, self.cache, prepare=prepare)

    # --- life ---------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """``host:port`` of the data plane; only after `start`."""
        return self._server.address

    @property
    def counters(self) -> StreamCounters:
        """Of the streams that routers opened."""
        return self._server.counters

    def describe(self) -> Member:
        """This replica as the directory should know it."""
        return Member(
            member_id=self.member_id,
            role="verifier",
            address=self.address,
            incarnation=self._hello.incarnation,
            model=self._hello.model,
            drafter=self._hello.drafter,
            load=float(self._runner.num_live),
            lane_owner=self._lease.holder,
            draining=self._draining,
            device=self._device,
            details={
                **self._runner.gauges,
                "kv_free_blocks": float(self._runner.free_kv_blocks),
                "feature_cache_bytes": float(self.cache.num_bytes),
                "link_queued_bytes": float(self.links.queued_bytes),
                "refused_frames": float(self.counters.refused),
                "feature_cache_evicted": float(self.cache.num_evicted),
                "links_overflowed": float(self.links.counters.overflowed),
            },
        )

    def check_health(self) -> None:
        """For the platform's health check.

        Raises:
            Unavailable: a task of this replica has died, or its engine hangs or fails step after
                step (a GPU or a worker process of it is gone, say); only a restart helps.
        """
        limit_s = self._config.router.step_timeout_s
        if self._step_began_s is not None and time.monotonic() - self._step_began_s > limit_s:
            raise Unavailable(f"a step of {self.member_id} has been running for over {limit_s} s")
        if self._runner.num_crashes >= MOST_CRASHES:
            raise Unavailable(
                f"the engine of {self.member_id} failed {self._runner.num_crashes} steps in a row"
            )
        for task in self._tasks:
            if task.done():
                raise Unavailable(f"task {task.get_name()!r} of {self.member_id} is dead")

    async def start(self) -> None:
        """Measure the profile, listen, register.

        Raises:
            ConfigError: the profile given is of another engine.
            Unavailable: the address cannot be bound.
        """
        if self.profile is None:
            budget_s = self._config.verifier.profile_budget_s
            self.profile = await self._runner.call(
                lambda: measure_profile(self._engine, budget_s=budget_s)
            )
        check_profile(self.profile, self._engine.limits)
        await self._server.start()
        self._tasks = (
            asyncio.create_task(self._step_loop(), name="steps"),
            asyncio.create_task(self._expiry_loop(), name="lease expiry"),
        )
        self._heartbeat.start()

    async def drain(self, deadline_s: float) -> bool:
        """Take no new lease, ask the holder for no new requests, wait until its last one is done.

        Returns:
            Whether they were, within ``deadline_s``.
        """
        self._draining = True
        self._heartbeat.beat_now()
        if self._holder is not None:
            self._holder.try_send(Drain(deadline_s=deadline_s))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._runner.idle.wait()
        return self._runner.idle.is_set()

    async def stop(self) -> None:
        """Leave the directory, end all streams, finish the running step. Idempotent."""
        await self._heartbeat.stop()
        await self._server.stop()
        tasks, self._tasks = self._tasks, ()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._runner.close()

    # --- streams ------------------------------------------------------------------------------

    async def _serve(self, stream: FrameStream) -> None:
        """One stream of a router, from Hello to end."""
        check_models(self._hello, stream.peer)
        lane_epoch = 0  # of the lease that this stream holds; epochs in force are never 0
        try:
            while True:
                frame = await stream.recv()
                self._lease.renew(lane_epoch, time.monotonic())
                try:
                    if isinstance(frame, Acquire):
                        lane_epoch = await self._acquire(stream, frame)
                    else:
                        await self._take(stream, frame, lane_epoch)
                except (LeaseError, Overloaded) as error:
                    await stream.refuse(error, fatal=False)
        finally:
            await self._drop(lane_epoch, "its stream ended")

    async def _acquire(self, stream: FrameStream, frame: Acquire) -> int:
        """Grant the lease and say so.

        Raises:
            LeaseError: held by another lane, or this replica is going away.
        """
        if stream.peer.role != "router" or frame.lane_id != stream.peer.member_id:
            raise LeaseError(
                f"{stream.peer.role} {stream.peer.member_id!r} asks for lane {frame.lane_id!r}",
                hint="a lane is named after the router that drives it",
            )
        if self._draining:
            raise LeaseError(f"verifier {self.member_id!r} is draining", hint="use another one")
        grant = self._lease.acquire(frame.lane_id, time.monotonic())
        previous, self._holder = self._holder, stream
        try:
            if previous is not None and previous is not stream:
                await previous.refuse(LeaseError(f"lease passed on to {frame.lane_id!r}"))
            self._clear_steps()
            await self._runner.reset()
            self._lease.renew(grant.lane_epoch, time.monotonic())
            await stream.send(self._lease_frame(grant.lane_epoch))
        except BaseException:
            if self._lease.release(grant.lane_epoch):  # nothing was admitted under it
                self._holder = None
            raise
        self._lease_changed.set()
        self._heartbeat.beat_now()
        return grant.lane_epoch

    def _lease_frame(self, lane_epoch: int) -> Lease:
        limits, profile = self._engine.limits, self.profile
        assert profile is not None, "not started"
        return Lease(
            lane_epoch=lane_epoch,
            ttl_s=self._lease.ttl_s,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            max_requests=limits.max_requests,
            max_step_tokens=limits.max_step_tokens,
            kv_block_tokens=limits.kv_block_tokens,
            kv_blocks=limits.kv_blocks,
            profile_tokens=np.array(profile.num_tokens, np.int32),
            profile_step_s=np.array(profile.step_s, np.float32),
            profile_row_s=profile.costs.row_s,
            profile_context_s=profile.costs.context_s,
            profile_pair_s=profile.costs.pair_s,
            profile_prefill_s=profile.costs.prefill_s,
            profile_noise=profile.noise,
            profile_fingerprint=fingerprint_of(limits),
        )

    async def _take(self, stream: FrameStream, frame: Frame, lane_epoch: int) -> None:
        """Any frame but `Acquire`.

        Raises:
            LeaseError: a step of another epoch than this stream's lease, or of one that is over.
            Overloaded: a step beyond the one that may wait.
            FrameError: a frame that a router does not send here.
        """
        if isinstance(frame, Step):
            self._lease.check(frame.lane_epoch)
            if frame.lane_epoch != lane_epoch:
                raise LeaseError("the lease was granted to another stream")
            if self._steps.qsize() + (self._step_began_s is not None) >= MAX_STEPS_IN_HAND:
                raise Overloaded(
                    f"step {frame.step_id}: one step runs and one waits already", retry_after_s=0.1
                )
            self._steps.put_nowait(frame)
        elif isinstance(frame, Ping):
            await stream.send(Pong(nonce=frame.nonce))
        elif isinstance(frame, Drain):
            logger.info("router %s is draining", stream.peer.member_id)
        elif not isinstance(frame, Pong | Refused):
            raise FrameError(f"{type(frame).__name__} is not for a verifier")

    # --- lease --------------------------------------------------------------------------------

    async def _drop(self, lane_epoch: int, why: str) -> None:
        """End a lease, if it is still in force, and free everything held under it."""
        if not self._lease.release(lane_epoch):
            return
        logger.info("lease %d is over: %s", lane_epoch, why)
        self._holder = None
        self._clear_steps()
        self._heartbeat.beat_now()
        await self._runner.reset()

    async def _expiry_loop(self) -> None:
        while True:
            self._lease_changed.clear()
            grant = self._lease.grant
            if grant is None:
                await self._lease_changed.wait()
                continue
            await asyncio.sleep(max(0.0, grant.expires_s - time.monotonic()))
            if self._step_began_s is not None:  # waiting for our answer is no silence
                self._lease.renew(grant.lane_epoch, time.monotonic())
                continue
            holder = self._holder
            grant = self._lease.grant
            if grant is None or grant.expires_s > time.monotonic():
                continue
            await self._drop(grant.lane_epoch, "its holder fell silent")
            if holder is not None:
                await holder.refuse(LeaseError("lease expired", hint="acquire it again"))

    # --- steps --------------------------------------------------------------------------------

    async def _step_loop(self) -> None:
        while True:
            step = await self._steps.get()
            grant, holder = self._lease.grant, self._holder
            if grant is None or holder is None or grant.lane_epoch != step.lane_epoch:
                continue  # the lease ended while it waited
            self._step_began_s = time.monotonic()
            result = await self._runner.run(grant.lane_id, step)
            # From here on the router may know, and send the one after the next.
            self._step_began_s = None
            self._lease.renew(step.lane_epoch, time.monotonic())
            try:
                await holder.send(result)
            except DSparkError as error:
                logger.warning("result of step %d undeliverable: %s", step.step_id, error)
                await self._drop(step.lane_epoch, "its results cannot be delivered")
                # Its router must not wait for what will never come.
                await (holder.refuse(error) if isinstance(error, FrameError) else holder.close())

    def _clear_steps(self) -> None:
        while not self._steps.empty():
            self._steps.get_nowait()
