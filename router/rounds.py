"""The state of one lane and its decisions: what is ready, when to go, what a result means.

Pure: no I/O, no clock of its own (``now`` comes in, seconds), so that a simulator can drive it as
well as `router.lane` does. One step is in flight at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cluster.errors import FrameError, error_for
from cluster.wire import FINISH_LENGTH, FINISH_NONE, Failure, Lease, Step, StepResult
from router.blocks import DraftBlock, Malformed
from router.counters import LaneCounters
from router.draft_lengths import DraftLengths, Judged
from router.draft_sessions import DraftSessions
from router.drafter_book import DrafterBook
from router.lane_request import Emission, Failed, LaneRequest, Outcome, Phase, Retry
from router.step_frame import PlannedRow, admission_of, pack_step, rebind_of
from router.step_result import ResultRow, read_result
from router.throughput import ThroughputProfile

_STALL_PAUSE_S: Final = 0.02
_RETRIED: Final = frozenset(
    {"DSparkError", "StaleFrame", "FrameError", "Overloaded", "Unavailable"}
)
"""Failures of a row that say nothing about the request itself."""


@dataclass(frozen=True, kw_only=True)
class _Flight:
    """The step that is running."""

    step_id: int
    rows: dict[int, PlannedRow]
    blocks: dict[int, DraftBlock]
    """By request: what it has in the step."""
    started: float


class LaneState:
    """Requests of one lane.

    Args:
        lease: what the verifier granted, with its limits.
        fingerprint: of the drafter projection that the verifier holds; empty: it cannot be drafted.
        prefill_budget: prompt tokens per step beside the verify rows.
        profile: of this verifier.
        book: drafters, shared by the lanes of a router.
        counters: likewise.
        lengths: decides how much of each block is verified.
    """

    def __init__(
        self,
        *,
        lease: Lease,
        fingerprint: str,
        prefill_budget: int,
        profile: ThroughputProfile,
        book: DrafterBook,
        counters: LaneCounters,
        lengths: DraftLengths,
    ) -> None:
        self.lease = lease
        self.profile = profile
        self.requests: dict[int, LaneRequest] = {}
        self._sessions = DraftSessions(fingerprint=fingerprint, book=book, counters=counters)
        self._lengths = lengths
        self._prefill_budget = min(prefill_budget, lease.max_step_tokens)
        self._counters = counters
        self._releases: list[int] = []
        self._flight: _Flight | None = None
        self._num_steps = 0
        self._pending_prefill = 0
        self._idle_since: float | None = None
        """When the last result came, if it left requests to verify."""
        self._link_s = 0.0
        self._not_before = 0.0

    # --- requests come and go -----------------------------------------------------------------

    def fits(self, num_tokens: int) -> bool:
        """Whether a request of at most so many positions can be added now.

        KV is reserved for the whole length at once: the verifier can never run out of it.
        """
        reserved = sum(
            self._kv_blocks(r.num_prompt + r.max_new_tokens) for r in self.requests.values()
        )
        return (
            len(self.requests) < self.lease.max_requests
            and reserved + self._kv_blocks(num_tokens) <= self.lease.kv_blocks
        )

    def add(self, request: LaneRequest, now: float) -> None:
        """Take a request; it goes to the verifier with the next step."""
        request.enter(Phase.QUEUED, now)
        self.requests[request.rid] = request

    def end(self, rid: int) -> None:
        """Forget a request and have the verifier free it. Unknown ones are ignored."""
        request = self._forget(rid)
        if request is not None and request.phase is not Phase.QUEUED:
            self._releases.append(rid)

    # --- drafts -------------------------------------------------------------------------------

    def take_block(self, drafter_id: str, block: DraftBlock | Malformed, now: float) -> None:
        """Match a block with the request that asked for it; else count why it is of no use."""
        if (request := self.requests.get(block.rid)) is None:
            self._counters.stale["unknown"] += 1
        else:
            self._sessions.take(drafter_id, request, block, now)

    def lose_session(self, drafter_id: str, rid: int, epoch: int, now: float) -> None:
        """A drafter no longer has this session."""
        request = self.requests.get(rid)
        if (
            request is not None
            and request.drafter is not None
            and (request.drafter.drafter_id, request.session_epoch) == (drafter_id, epoch)
        ):
            self._sessions.unbind(request, now, pause=True)

    def lose_drafter(self, drafter_id: str, now: float) -> None:
        """A drafter is gone: its requests go plain, and to another one as soon as they can."""
        for request in self.requests.values():
            if request.drafter is not None and request.drafter.drafter_id == drafter_id:
                self._sessions.unbind(request, now, pause=False)

    # --- gather -------------------------------------------------------------------------------

    def next_step_at(self, now: float) -> float:
        """When the idle verifier should get its next step: past or now for at once, inf for
        "not before something happens"."""
        if self._flight is not None:
            return math.inf
        phases = {request.phase for request in self.requests.values()}
        if Phase.AWAITING in phases and Phase.READY not in phases:
            prefill = phases & {Phase.QUEUED, Phase.PREFILLING}
            # A step without rows makes no row wait for the drafters: prefill meanwhile.
            return self._not_before if prefill else self._first_due()
        if Phase.AWAITING in phases:
            return self._first_due()
        if Phase.READY in phases or self._releases:
            return now
        return self._not_before if phases else math.inf

    def ready_rows(self, now: float) -> list[LaneRequest]:
        """The rows of a step that starts now, longest waiting first. Late drafts are given up."""
        for request in self.requests.values():
            if request.phase is Phase.AWAITING and request.due <= now:
                self._sessions.expire(request, now)
        ready = [r for r in self.requests.values() if r.phase is Phase.READY]
        ready.sort(key=lambda request: (request.since, request.rid))
        # Prefill must not starve behind rows that fill the step.
        room = self.lease.max_step_tokens - (1 if self.num_prefill_tokens() else 0)
        return ready[:room]

    def num_prefill_tokens(self) -> int:
        """Prompt tokens that the next step may compute."""
        queued = sum(len(r.ids) for r in self.requests.values() if r.phase is Phase.QUEUED)
        return min(self._pending_prefill + queued, self._prefill_budget)

    def max_draft_tokens(self, num_rows: int) -> int:
        """Draft tokens that fit beside the rows' anchors and the prefill."""
        return max(self.lease.max_step_tokens - num_rows - self.num_prefill_tokens(), 0)

    # --- schedule and dispatch ----------------------------------------------------------------

    def schedule(self, rows: Sequence[LaneRequest]) -> list[int]:
        """Draft tokens to verify per row of the step that goes now."""
        room = self.max_draft_tokens(len(rows))
        return self._lengths.choose(rows, num_prefill=self.num_prefill_tokens(), room=room)

    def dispatch(self, rows: Sequence[LaneRequest], lengths: Sequence[int], now: float) -> Step:
        """Form the step of these rows and draft lengths; from here on it is in flight."""
        assert self._flight is None, "one step at a time"
        if self._idle_since is not None:
            self.profile.record_gap(now - self._idle_since + self._link_s)
        queued = [r for r in self.requests.values() if r.phase is Phase.QUEUED]
        for request in queued:
            self._sessions.bind(request)
            request.enter(Phase.PREFILLING, now)
            self._pending_prefill += len(request.ids)
        rebinds = [rebind_of(r) for r in rows if self._sessions.rebind(r, now)]
        planned = [
            PlannedRow(
                request=request,
                num_draft=length,
                want_draft=request.drafter is not None and request.wants_draft,
            )
            for request, length in zip(rows, lengths, strict=True)
        ]
        num_verify = len(rows) + sum(lengths)
        step = pack_step(
            planned,
            lane_epoch=self.lease.lane_epoch,
            step_id=self._num_steps,
            admissions=[admission_of(request) for request in queued],
            rebinds=rebinds,
            releases=self._releases,
            prefill_budget=min(self._prefill_budget, self.lease.max_step_tokens - num_verify),
        )
        for request in rows:
            request.enter(Phase.IN_STEP, now)
        self._flight = _Flight(
            step_id=self._num_steps,
            rows={p.request.rid: p for p in planned},
            blocks={r.rid: r.block for r in rows if r.block is not None},
            started=now,
        )
        self._num_steps += 1
        self._releases = []
        return step

    # --- apply --------------------------------------------------------------------------------

    def apply(self, result: StepResult, now: float) -> list[Outcome]:
        """Account for a result and say what it means for each request.

        Raises:
            FrameError: not the result of the step in flight, or ids that do not exist: this
                verifier cannot be trusted with anything.
        """
        flight = self._flight
        if flight is None or (result.lane_epoch, result.step_id) != (
            self.lease.lane_epoch,
            flight.step_id,
        ):
            raise FrameError(f"result of step {result.step_id}, which is not in flight")
        rows = read_result(result, vocab_size=self.lease.vocab_size)
        self._flight = None
        self._pending_prefill = result.pending_prefill_tokens
        outcomes: list[Outcome] = [
            self._apply_row(row, flight, now) for row in rows if row.rid in self.requests
        ]
        outcomes += [self._fail(f) for f in result.failures if f.rid in self.requests]
        settled = {outcome.rid for outcome in outcomes}
        for rid in (flight.rows.keys() & self.requests.keys()) - settled:
            outcomes.append(self._give_up(rid, "the step says nothing about it"))
        for rid in result.unbound.tolist():
            if request := self.requests.get(rid):
                self._sessions.unbind(request, now, pause=True)
        self._record(result, outcomes, flight, now)
        return outcomes

    def _apply_row(self, row: ResultRow, flight: _Flight, now: float) -> Outcome:
        request = self.requests[row.rid]
        planned = flight.rows.get(row.rid)
        num_draft = 0 if planned is None else planned.num_draft
        expected = Phase.PREFILLING if planned is None else Phase.IN_STEP
        if request.phase is not expected or not row.follows(request, num_draft):
            return self._give_up(row.rid, "the result does not follow from what was sent")
        block = request.block
        asked = request.drafter is not None if planned is None else planned.want_draft
        request.commit(row.token_ids)
        finish = row.finish
        if finish != FINISH_NONE:
            self._forget(row.rid)  # the verifier has freed it already
        elif request.remaining == 0:
            finish = FINISH_LENGTH
            self.end(row.rid)
        elif asked:
            self._sessions.expect(request, now)
        else:
            request.enter(Phase.READY, now)
        if planned is not None:
            self._counters.count_row(block, num_draft, row.num_accepted, len(row.token_ids))
        return Emission(
            rid=row.rid,
            token_ids=row.token_ids,
            logprobs=row.logprobs,
            finish=finish,
            is_round=planned is not None,
            num_proposed=0 if block is None else len(block.ids),
            num_verified=num_draft,
            num_accepted=row.num_accepted,
        )

    def _fail(self, failure: Failure) -> Outcome:
        if failure.code in _RETRIED:
            return self._give_up(failure.rid, f"{failure.code}: {failure.message}")
        self.end(failure.rid)
        return Failed(rid=failure.rid, error=error_for(failure.code, failure.message))

    def _record(
        self, result: StepResult, outcomes: Sequence[Outcome], flight: _Flight, now: float
    ) -> None:
        """Learn from the step that ran (not from the one that was planned)."""
        self._lengths.learn(
            [
                Judged(flight.blocks[o.rid], flight.rows[o.rid].request.sampling, o)
                for o in outcomes
                if isinstance(o, Emission) and o.rid in flight.blocks
            ]
        )
        num_tokens = result.num_real_tokens
        self._counters.count_step(result, self.profile.step_s(num_tokens))
        self.profile.record(num_tokens=num_tokens, step_s=result.step_s)
        phases = {request.phase for request in self.requests.values()}
        if num_tokens == 0 and Phase.PREFILLING in phases:
            self._not_before = now + _STALL_PAUSE_S  # do not spin on a verifier that cannot go on
        self._link_s = max(now - flight.started - result.step_s, 0.0)
        self._idle_since = now if phases & {Phase.AWAITING, Phase.READY} else None

    # --- the rest -----------------------------------------------------------------------------

    def _give_up(self, rid: int, reason: str) -> Retry:
        self._counters.num_retries += 1
        self.end(rid)
        return Retry(rid=rid, reason=reason)

    def _forget(self, rid: int) -> LaneRequest | None:
        request = self.requests.pop(rid, None)
        if request is not None:
            self._sessions.forget(request)
        if not self.requests:
            self._idle_since = None
        return request

    def _first_due(self) -> float:
        return min(r.due for r in self.requests.values() if r.phase is Phase.AWAITING)

    def _kv_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // max(self.lease.kv_block_tokens, 1))
