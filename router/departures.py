"""Forming the steps of a lane: admissions, rebinds, rows, and for which rows to ask. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from cluster.wire import MAX_FRAME_BYTES, Lease, Step
from router.draft_lengths import DraftLengths
from router.draft_outlook import Decoding
from router.draft_sessions import DraftSessions
from router.flights import Flight
from router.gathering import Gathering
from router.gating import DraftGate
from router.lane_request import DECODING, LaneRequest, Phase
from router.roster import Roster
from router.step_frame import PlannedRow, admission_of, pack_step, rebind_of
from router.throughput import ThroughputProfile

_MOST_CONSTRAINT_CHARS: Final = MAX_FRAME_BYTES // 8
"""Of one step: half a frame, at up to four bytes each."""


class Departure(NamedTuple):
    """A step that is ready to go."""

    step: Step
    flight: Flight


class Departures:
    """Steps of one lane.

    Args:
        gate: decides where a block is asked for; None: wherever one can be of use.
    """

    def __init__(
        self,
        *,
        lease: Lease,
        profile: ThroughputProfile,
        lengths: DraftLengths,
        gate: DraftGate | None,
        sessions: DraftSessions,
        roster: Roster,
        gathering: Gathering,
    ) -> None:
        self._lease = lease
        self._profile = profile
        self._lengths = lengths
        self._gate = gate
        self._sessions = sessions
        self._roster = roster
        self._gathering = gathering
        self._num_steps = 0

    def form(
        self,
        rows: Sequence[LaneRequest],
        lengths: Sequence[int],
        releases: Sequence[int],
        now: float,
    ) -> Departure:
        """The step of these rows and draft lengths. All queued requests that a frame holds go with
        it."""
        num_draft = sum(lengths)
        room = self._lease.max_step_tokens - len(rows) - num_draft
        num_prefill = min(self._gathering.prefill_tokens(len(rows), now), room)
        queued = self._admit(now)
        rebinds = [rebind_of(r) for r in rows if self._sessions.rebind(r, now)]
        asks = self._asks(rows, lengths)
        planned = [
            PlannedRow(request, length, ask, request.phase is Phase.IN_STEP)
            for request, length, ask in zip(rows, lengths, asks, strict=True)
        ]
        step = pack_step(
            planned,
            lane_epoch=self._lease.lane_epoch,
            step_id=self._num_steps,
            admissions=[admission_of(request) for request in queued],
            rebinds=rebinds,
            releases=releases,
            prefill_budget=num_prefill,
        )
        flight = Flight(
            step_id=self._num_steps,
            rows={row.request.rid: row for row in planned},
            blocks={r.rid: r.block for r in rows if r.block is not None},
            drafting=frozenset(r.rid for r in rows if r.drafting),
            rebound=frozenset(rebind.rid for rebind in rebinds),
            num_asked=sum(asks),
            num_admitted=sum(len(request.ids) for request in queued),
            num_prefill=num_prefill,
            sent=now,
            predicted_s=self._profile.step_s(self._gathering.load_of(rows, num_draft, num_prefill)),
        )
        self._num_steps += 1
        for request in rows:
            request.enter(Phase.IN_STEP, now)
        return Departure(step, flight)

    def _admit(self, now: float) -> list[LaneRequest]:
        """The queued requests that a frame holds, from now on the verifier's."""
        queued = first_batch(self._roster.within(Phase.QUEUED).values())
        for request in queued:
            self._sessions.bind(request)
            request.enter(Phase.PREFILLING, now)
        if queued:
            for request, asks in zip(queued, self._asks_first(queued), strict=True):
                request.asks_first = asks
        return queued

    def _asks(self, rows: Sequence[LaneRequest], lengths: Sequence[int]) -> list[bool]:
        """For which rows of the step that goes now to ask for the next block."""
        if not self._lengths.verifies_drafts:
            return [False] * len(rows)
        if self._gate is None:
            return [r.drafter is not None and r.wants_draft for r in rows]
        return self._gate.ask(rows, lengths, self._decoding(rows))

    def _asks_first(self, queued: Sequence[LaneRequest]) -> list[bool]:
        """For which requests that are admitted now to ask for the block behind the prompt."""
        if not self._lengths.verifies_drafts:
            return [False] * len(queued)
        if self._gate is None:
            return [True] * len(queued)
        return self._gate.ask_first(queued, self._decoding(queued, (*DECODING, Phase.PREFILLING)))

    def _decoding(self, now: Sequence[LaneRequest], phases: Sequence[Phase] = DECODING) -> Decoding:
        """What is decoded, or in one of these phases, and those that are decided about now."""
        rids = {request.rid for request in now}
        within = [r for phase in phases for r in self._roster.within(phase).values()]
        others = [request for request in within if request.rid not in rids]
        load = self._gathering.load_of([*now, *others], 0, 0)
        room = max(self._lease.max_step_tokens - load.num_tokens, 0)
        return Decoding(load=load, times=self._profile, room=room, others=others)


def first_batch(queued: Iterable[LaneRequest]) -> list[LaneRequest]:
    """The leading requests whose constraints fit into one step; the first one always does.

    A thousand long schemas at once, when a verifier has died say, would make a frame that nobody
    may send, and end the lane.
    """
    batch: list[LaneRequest] = []
    num_chars = 0
    for request in queued:
        num_chars += len(request.constraint)
        if batch and num_chars > _MOST_CONSTRAINT_CHARS:
            break
        batch.append(request)
    return batch
