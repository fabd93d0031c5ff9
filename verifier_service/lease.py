"""The lease of a verifier: who may drive it. Pure: the clock is passed in.

The verifier grants the lease of itself, with an epoch that rises with every grant and, since it
starts from the replica's incarnation (its start time), over restarts as well. So a router whose
lease has passed on, knowingly or not, can never reach the engine: its epoch is stale.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.errors import LeaseError
from cluster.timeouts import require_timeout


@dataclass(frozen=True, kw_only=True)
class Grant:
    """A lease in force."""

    lane_id: str
    lane_epoch: int
    expires_s: float


class LeaseState:
    """At most one grant at a time.

    Args:
        ttl_s: a holder not heard of for this long loses the lease.
        incarnation: of the replica (start time in ns); epochs start above it.
    """

    def __init__(self, *, ttl_s: float, incarnation: int) -> None:
        self.ttl_s = require_timeout("lease_ttl_s", ttl_s)
        self._last_epoch = incarnation
        self._grant: Grant | None = None

    @property
    def grant(self) -> Grant | None:
        """The lease in force. Past its time it stays until `release` or `acquire` ends it."""
        return self._grant

    @property
    def holder(self) -> str:
        """Lane id of the holder, empty when free."""
        return self._grant.lane_id if self._grant else ""

    def acquire(self, lane_id: str, now_s: float) -> Grant:
        """Grant the lease, under a new epoch.

        A holder that asks again (its stream broke, or it restarted under its name) gets a new
        epoch, and its old one is stale: whatever it had here is forgotten.

        Raises:
            LeaseError: another lane holds it; the hint says for how long at least.
        """
        held = self._grant
        if held and held.lane_id != lane_id and now_s < held.expires_s:
            raise LeaseError(
                f"verifier is leased to {held.lane_id!r}",
                hint=f"retry in {held.expires_s - now_s:.1f} s",
            )
        self._last_epoch += 1
        self._grant = Grant(
            lane_id=lane_id, lane_epoch=self._last_epoch, expires_s=now_s + self.ttl_s
        )
        return self._grant

    def check(self, lane_epoch: int) -> None:
        """Let only the holder through.

        Raises:
            LeaseError: ``lane_epoch`` is not the one in force.
        """
        if self._grant is None or self._grant.lane_epoch != lane_epoch:
            holder = f"held by {self.holder!r}" if self._grant else "not held"
            raise LeaseError(
                f"lane epoch {lane_epoch} is stale: the lease is {holder}",
                hint="acquire it again",
            )

    def renew(self, lane_epoch: int, now_s: float) -> None:
        """The holder was heard of. A stale epoch renews nothing."""
        if self._grant and self._grant.lane_epoch == lane_epoch:
            self._grant = Grant(
                lane_id=self._grant.lane_id, lane_epoch=lane_epoch, expires_s=now_s + self.ttl_s
            )

    def release(self, lane_epoch: int) -> bool:
        """End the lease if it is still this one; whether it was."""
        if self._grant is None or self._grant.lane_epoch != lane_epoch:
            return False
        self._grant = None
        return True
