"""The directory of live members: pure state, an in-process one, one behind a named Ray actor.

All of it is soft: every member repeats itself each heartbeat, so a directory that starts empty is
complete one period later, and nobody stops working while it is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Final

from cluster.errors import ConfigError, Unavailable
from cluster.members import Directory, Member
from cluster.priority import give_way
from cluster.timeouts import require_timeout

logger = logging.getLogger(__name__)

ACTOR_NAME: Final = "dspark-directory"


class DirectoryState:
    """Who is alive, as far as heartbeats tell. Pure: the clock is passed in.

    Args:
        ttl_s: a member not heard of for this long is gone.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = require_timeout("ttl_s", ttl_s)
        self._heard: dict[str, tuple[Member, float]] = {}

    def heartbeat(self, member: Member, now_s: float) -> None:
        """Register or refresh. An older incarnation than the live one known is a ghost: ignored."""
        known = self._heard.get(member.member_id)
        if known and member.incarnation < known[0].incarnation and self._alive(known[1], now_s):
            return
        self._heard[member.member_id] = (member, now_s)

    def leave(self, member_id: str) -> None:
        """Forget at once; unknown ids are ignored."""
        self._heard.pop(member_id, None)

    def members(self, now_s: float) -> tuple[Member, ...]:
        """The live ones, by id; the others are forgotten."""
        self._heard = {k: v for k, v in self._heard.items() if self._alive(v[1], now_s)}
        return tuple(self._heard[key][0] for key in sorted(self._heard))

    def _alive(self, heard_s: float, now_s: float) -> bool:
        return now_s - heard_s <= self._ttl_s


class LocalDirectory:
    """A `Directory` inside one process: single-process serving, and tests."""

    def __init__(self, ttl_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._state = DirectoryState(ttl_s)
        self._clock = clock

    async def heartbeat(self, member: Member) -> None:
        """Register or refresh."""
        self._state.heartbeat(member, self._clock())

    async def leave(self, member_id: str) -> None:
        """Forget at once."""
        self._state.leave(member_id)

    async def members(self) -> tuple[Member, ...]:
        """All live members."""
        return self._state.members(self._clock())


class RayDirectory:
    """A `Directory` kept by one named, detached Ray actor; whoever misses it creates it.

    Args:
        application: Ray namespace of the actor, so that two applications do not meet.
        ttl_s: see `DirectoryState`; used when this caller is the one to create the actor.
        timeout_s: of every call, finding or creating the actor included.
    """

    def __init__(self, application: str, *, ttl_s: float, timeout_s: float = 5.0) -> None:
        if not application:
            raise ConfigError("cluster.application: empty", hint="it names the Ray namespace")
        self._application = application
        self._ttl_s = require_timeout("ttl_s", ttl_s)
        self._timeout_s = require_timeout("timeout_s", timeout_s)
        self._actor: Any = None

    async def heartbeat(self, member: Member) -> None:
        """Register or refresh. Raises `Unavailable`."""
        await self._call("heartbeat", member)

    async def leave(self, member_id: str) -> None:
        """Forget at once. Raises `Unavailable`."""
        await self._call("leave", member_id)

    async def members(self) -> tuple[Member, ...]:
        """All live members. Raises `Unavailable`."""
        found: tuple[Member, ...] = await self._call("members")
        return found

    async def _call(self, method: str, *args: Any) -> Any:
        """Call the actor; if it died since the last call, once more on a new one."""
        try:
            async with asyncio.timeout(self._timeout_s):
                try:
                    return await self._remote(method, *args)
                except _ray_errors():
                    self._actor = None
                    return await self._remote(method, *args)
        except _ray_errors(TimeoutError) as error:
            self._actor = None
            raise Unavailable(f"directory: {method} failed: {error or 'no answer'}") from error

    async def _remote(self, method: str, *args: Any) -> Any:
        if self._actor is None:
            self._actor = await asyncio.to_thread(self._find)
        # Actor methods are attributes made by Ray at run time; `method` is one of ours above.
        return await getattr(self._actor, method).remote(*args)

    def _find(self) -> Any:
        import ray

        return (
            ray.remote(_DirectoryActor)
            .options(
                name=ACTOR_NAME,
                namespace=self._application,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                max_restarts=-1,
            )
            .remote(self._ttl_s)
        )


def end_directory(application: str) -> None:
    """End the actor, if there is one, once the application is down: live members re-create it."""
    import ray

    with contextlib.suppress(ValueError):  # there is none
        ray.kill(ray.get_actor(ACTOR_NAME, namespace=application))


class _DirectoryActor:
    """`DirectoryState` with a clock, for Ray."""

    def __init__(self, ttl_s: float) -> None:
        give_way()
        self._state = DirectoryState(ttl_s)

    def heartbeat(self, member: Member) -> None:
        self._state.heartbeat(member, time.monotonic())

    def leave(self, member_id: str) -> None:
        self._state.leave(member_id)

    def members(self) -> tuple[Member, ...]:
        return self._state.members(time.monotonic())


def _ray_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    from ray.exceptions import RayError

    # ValueError: the name vanished between look-up and creation.
    return (RayError, ValueError, *others)


class Heartbeat:
    """Tells the directory about one member, each period and whenever `beat_now` is called.

    Args:
        describe: the member as it is at this moment; called in the event loop.
    """

    def __init__(
        self, directory: Directory, describe: Callable[[], Member], *, period_s: float
    ) -> None:
        self._directory = directory
        self._describe = describe
        self._period_s = require_timeout("period_s", period_s)
        self._nudge = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._away = False

    def start(self) -> None:
        """Beat at once and from then on."""
        if self._task is None:
            self._task = asyncio.create_task(self._loop(), name="heartbeat")

    def beat_now(self) -> None:
        """Something that others act on has changed: do not wait for the period to end."""
        self._nudge.set()

    async def stop(self) -> None:
        """Stop and take the member out of the directory, if that can be reached. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with contextlib.suppress(Unavailable):
            await self._directory.leave(self._describe().member_id)

    async def _loop(self) -> None:
        while True:
            self._nudge.clear()
            await self._beat()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._period_s):
                    await self._nudge.wait()

    async def _beat(self) -> None:
        """One heartbeat. An outage is logged once, whatever its kind: the member works on."""
        try:
            await self._directory.heartbeat(self._describe())
        except Exception as error:  # a directory that misbehaves must not end a replica
            if not self._away:
                logger.warning("directory unreachable, going on without it: %s", error)
            self._away = True
        else:
            if self._away:
                logger.info("directory reachable again")
            self._away = False
