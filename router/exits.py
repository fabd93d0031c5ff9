"""Requests that leave a lane, and what the verifier has yet to be told of it. Pure."""

from __future__ import annotations

from router.draft_sessions import DraftSessions
from router.gating import DraftGate
from router.lane_request import LaneRequest, Phase
from router.roster import Roster


class Exits:
    """The way out of one lane.

    Args:
        gate: None if the lane has none.
    """

    def __init__(self, roster: Roster, sessions: DraftSessions, gate: DraftGate | None) -> None:
        self._roster = roster
        self._sessions = sessions
        self._gate = gate
        self._releases: list[int] = []

    @property
    def has_releases(self) -> bool:
        """Whether the verifier holds requests that are no longer here."""
        return bool(self._releases)

    def end(self, rid: int) -> None:
        """Forget a request and have the verifier free it. Unknown ones are ignored."""
        request = self.forget(rid)
        if request is not None and request.phase is not Phase.QUEUED:
            self._releases.append(rid)

    def forget(self, rid: int) -> LaneRequest | None:
        """Forget a request that the verifier has freed; None if it is unknown."""
        request = self._roster.remove(rid)
        if request is not None:
            self._sessions.forget(request)
            if self._gate is not None:
                self._gate.forget(rid)
        return request

    def take_releases(self) -> list[int]:
        """Request ids for the next step to release."""
        releases, self._releases = self._releases, []
        return releases
