"""The scheduling that all routers of a cluster agree on when it is changed while they serve. Pure.

Every change has a version one higher than any that its router has heard of. Routers announce what
they follow in their heartbeats and adopt the newest that they see; of two changes made at the same
time the one whose values sort last wins, everywhere alike. Soft state: a router that starts learns
it from the others, and when the last one has stopped, the configuration counts again.
"""

from __future__ import annotations

from collections.abc import Iterable

from cluster.config import SchedulingConfig
from cluster.errors import ConfigError
from cluster.members import Member
from cluster.scheduling_text import scheduling_text, with_values


class SharedScheduling:
    """What one router follows.

    Args:
        configured: in force until something else is heard of.
    """

    def __init__(self, configured: SchedulingConfig) -> None:
        self.current = configured
        self.version = 0
        """Of the last change that is followed; 0 for the configuration."""

    def change(self, scheduling: SchedulingConfig) -> None:
        """Someone asks this router for another scheduling."""
        self.current = scheduling
        self.version += 1

    def follow(self, members: Iterable[Member]) -> bool:
        """Adopt the newest scheduling that a router announces; whether that changes anything.

        Values that this release cannot read are passed over: their router is of another one.
        """
        before = self.current
        for member in members:
            if member.role != "router" or not member.scheduling:
                continue
            if (member.scheduling_version, sorted(member.scheduling.items())) <= self._rank:
                continue
            try:
                self.current = with_values(self.current, member.scheduling)
            except ConfigError:
                continue
            self.version = member.scheduling_version
        return self.current != before

    @property
    def announcement(self) -> dict[str, str]:
        """For the heartbeat: all values by name, empty while the configuration counts."""
        return scheduling_text(self.current) if self.version else {}

    @property
    def _rank(self) -> tuple[int, list[tuple[str, str]]]:
        return self.version, sorted(self.announcement.items())
