"""A router's eye on the directory: who is there, looked up once a heartbeat."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cluster.errors import Unavailable
from cluster.members import Directory, Member, Role
from cluster.timeouts import require_timeout

logger = logging.getLogger(__name__)


class DirectoryWatch:
    """Looks, tells, and goes on with what it knew while the directory is away.

    Args:
        directory: of the cluster.
        period_s: between two looks.
        on_look: called after each of them.
    """

    def __init__(
        self, directory: Directory, *, period_s: float, on_look: Callable[[], None]
    ) -> None:
        self.members: tuple[Member, ...] = ()
        """As listed last."""
        self._directory = directory
        self._period_s = require_timeout("period_s", period_s)
        self._on_look = on_look
        self._task: asyncio.Task[None] | None = None

    def others(self, me: str) -> dict[str, Member]:
        """The other routers, by id."""
        return {m.member_id: m for m in self.members if m.role == "router" and m.member_id != me}

    def num_members(self, role: Role) -> int:
        """How many of a role are live."""
        return sum(member.role == role for member in self.members)

    def figures(self) -> dict[str, float]:
        """What verifiers and drafters say of themselves, flat."""
        return {
            f"{member.role}.{member.member_id}.{name}": value
            for member in self.members
            if member.role != "router"
            for name, value in member.details.items()
        }

    def check(self) -> None:
        """Whether it still looks.

        Raises:
            Unavailable: its task has died; only a restart helps.
        """
        if self._task is not None and self._task.done():
            raise Unavailable("the directory is no longer watched")

    def start(self) -> None:
        """Look at once and from then on."""
        self._task = asyncio.create_task(self._loop(), name="directory watch")

    async def stop(self) -> None:
        """Look no more. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _loop(self) -> None:
        while True:
            try:
                self.members = await self._directory.members()
            except Exception as error:  # a directory that misbehaves must not end a replica
                logger.warning("directory: %s; going on with what is known", error)
            self._on_look()
            await asyncio.sleep(self._period_s)
