"""Which verifiers a router takes, and where a request goes. Pure functions of plain data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from cluster.members import Member

FREE_SLOTS: Final = "free_slots"
"""Gauge in a router's `Member.details`: requests it could start at once, its queue deducted."""
SLOTS: Final = "slots"
"""Likewise: requests that its lanes can hold in all."""


@dataclass(frozen=True, kw_only=True)
class LaneLoad:
    """How full a lane is."""

    lane_id: int
    fits: bool
    """Whether the request in question can start here."""
    num_requests: int
    max_requests: int


def verifiers_to_acquire(
    members: Iterable[Member], *, me: str, model: str, held: Collection[str]
) -> list[Member]:
    """Free verifiers that this router should ask for a lease, best first.

    No router takes more than its share, ceil(verifiers / routers), and while some router has no
    lane at all, one that has leaves it a free verifier.

    Args:
        me: our member id; a verifier that the directory lists as ours but that we do not hold is
            free (we have restarted, or lost it).
        model: fingerprint of the target; empty takes any.
        held: member ids of the verifiers whose lanes we drive.
    """
    live = [m for m in members if not m.draining]
    verifiers = [m for m in live if m.role == "verifier" and (not model or m.model == model)]
    routers = {m.member_id for m in live if m.role == "router"} | {me}
    free = [m for m in verifiers if m.lane_owner in ("", me) and m.member_id not in held]
    share = -(-len(verifiers) // len(routers))
    mine = [m for m in verifiers if m.member_id in held]  # not those that are draining
    quota = share - len(mine)
    if mine:
        owners = {m.lane_owner for m in verifiers}
        quota = min(quota, len(free) - len(routers - owners - {me}))
    free.sort(key=lambda m: (m.load, m.member_id))
    return free[: max(quota, 0)]


def choose_lane(lanes: Sequence[LaneLoad]) -> int | None:
    """The emptiest lane that can start the request now, None if there is none."""
    fitting = [lane for lane in lanes if lane.fits]
    if not fitting:
        return None
    best = min(fitting, key=lambda lane: (lane.num_requests / lane.max_requests, lane.lane_id))
    return best.lane_id


def choose_peer(routers: Iterable[Member], *, avoid: Collection[str]) -> Member | None:
    """The router with the most free slots, None if all are full.

    Args:
        routers: all but ourselves.
        avoid: routers that refused or died a moment ago.
    """
    peers = [
        m
        for m in routers
        if m.member_id not in avoid and not m.draining and m.details.get(FREE_SLOTS, 0.0) >= 1
    ]
    return max(peers, key=lambda m: (m.details[FREE_SLOTS], m.member_id), default=None)
