"""Members of the cluster and the directory that lists them (soft state, rebuilt by heartbeats)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

Role = Literal["router", "verifier", "drafter"]


@dataclass(frozen=True, kw_only=True)
class Member:
    """One live replica, as it describes itself in every heartbeat."""

    member_id: str
    role: Role
    address: str
    """``host:port`` of its data-plane server."""
    incarnation: int
    """Start time in ns: a restarted replica is another incarnation."""
    model: str
    """Fingerprint of the target model it serves or drafts for."""
    drafter: str
    """Fingerprint of the drafter checkpoint (verifiers: of the projection they hold)."""
    load: float
    """Requests or sessions in hand."""
    lane_owner: str = ""
    """Verifiers: member id of the router that holds the lease, empty when free."""
    draining: bool = False
    device: str = ""
    """Verifiers and drafters: identity of what they compute on (`cluster.device_identity`)."""
    scheduling: dict[str, str] = field(default_factory=dict)
    """Routers: the scheduling that was set while serving, all values by name; empty for none."""
    scheduling_version: int = 0
    """Routers: rises with each change of it."""
    details: dict[str, float] = field(default_factory=dict)
    """Free-form gauges for people and policies (kv_free, queue, ...)."""


class Directory(Protocol):
    """What a replica needs of the directory. The implementation bounds every call in time."""

    async def heartbeat(self, member: Member) -> None:
        """Register or refresh."""
        ...

    async def leave(self, member_id: str) -> None:
        """Forget at once (planned shutdown)."""
        ...

    async def members(self) -> tuple[Member, ...]:
        """All members heard of within the time to live.

        Raises:
            Unavailable: the directory cannot be reached; callers go on with what they knew.
        """
        ...
