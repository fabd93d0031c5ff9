"""The state of one lane and its decisions: what is ready, when to go, what a result means.

Pure: no I/O, no clock of its own (``now`` comes in, seconds), so that a simulator can drive it as
well as `router.lane` does. Up to two steps are in the air: one runs, one is queued behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from cluster.config import SchedulingConfig
from cluster.errors import FrameError
from cluster.wire import Lease, Step, StepResult
from router.blocks import DraftBlock, Malformed
from router.counters import LaneCounters
from router.departures import Departures
from router.draft_lengths import DraftLengths
from router.draft_sessions import DraftSessions
from router.drafter_book import DrafterBook
from router.exits import Exits
from router.flights import MOST, Flights
from router.gathering import Gathering
from router.gating import DraftGate
from router.lane_request import LaneRequest, Outcome, Phase
from router.learning import Learning
from router.returns import Returns
from router.roster import Latency, Roster
from router.throughput import ThroughputProfile

_STALL_PAUSE_S: Final = 0.02


class LaneState:
    """Requests of one lane.

    Args:
        lease: what the verifier granted, with its limits.
        fingerprint: of the drafter projection that the verifier holds; empty: it cannot be drafted.
        prefill_budget: most prompt tokens per step beside the verify rows.
        profile: of this verifier.
        book: drafters, shared by the lanes of a router.
        counters: likewise.
        lengths: decides how much of each block is verified.
        gate: decides where a block is asked for; None: wherever one can be of use.
        device: identity of the verifier's device; empty: not known, and no drafter's.
        scheduling: see `configure`.
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
        gate: DraftGate | None = None,
        device: str = "",
        scheduling: SchedulingConfig | None = None,
    ) -> None:
        self.lease = lease
        self.profile = profile
        self._book = book
        self._counters = counters
        self._lengths = lengths
        self._gate = gate
        self._flights = Flights()
        self._roster = Roster(kv_block_tokens=lease.kv_block_tokens, latency=self._latency)
        self._sessions = DraftSessions(fingerprint=fingerprint, book=book, counters=counters)
        self._exits = Exits(self._roster, self._sessions, gate)
        self._gathering = Gathering(
            lease=lease,
            prefill_budget=prefill_budget,
            profile=profile,
            book=book,
            roster=self._roster,
            flights=self._flights,
            device=device,
        )
        self._departures = Departures(
            lease=lease,
            profile=profile,
            lengths=lengths,
            gate=gate,
            sessions=self._sessions,
            roster=self._roster,
            gathering=self._gathering,
        )
        self._returns = Returns(
            vocab_size=lease.vocab_size,
            roster=self._roster,
            sessions=self._sessions,
            exits=self._exits,
            counters=counters,
        )
        self._learning = Learning(
            profile=profile,
            lengths=lengths,
            gate=gate,
            means=self._gathering.means,
            counters=counters,
        )
        self._asked: Counter[str] = Counter()
        """Blocks that the latest step to come back has asked for, by drafter."""
        self._had_work = False
        """Whether it left requests to verify: the time since then is exposed."""
        self.configure(scheduling or SchedulingConfig())

    @property
    def requests(self) -> Mapping[int, LaneRequest]:
        """Those in the lane, oldest first."""
        return self._roster.requests

    def gate_figures(self) -> dict[str, float]:
        """What the draft gate goes by (`DraftGate.figures`); empty if there is none."""
        return {} if self._gate is None else self._gate.figures()

    def configure(self, scheduling: SchedulingConfig) -> None:
        """Decide like this from now on; steps in the air are not affected."""
        self._gathering.scheduling = scheduling
        self._gathering.look_again()
        self.profile.live = scheduling.live_profile
        self.profile.context_term = scheduling.context_term
        self._lengths.configure(scheduling)
        if self._gate is not None:
            self._gate.configure(scheduling)

    # --- requests come and go -----------------------------------------------------------------

    def fits(self, num_tokens: int) -> bool:
        """Whether a request of at most so many positions can be added now.

        KV is reserved for the whole length at once: the verifier can never run out of it.
        """
        needed = self._roster.kv_blocks + self._roster.kv_blocks_for(num_tokens)
        return len(self.requests) < self.lease.max_requests and needed <= self.lease.kv_blocks

    def add(self, request: LaneRequest, now: float) -> None:
        """Take a request; it goes to the verifier with the next step."""
        self._roster.add(request, now)

    def end(self, rid: int) -> None:
        """Forget a request and have the verifier free it. Unknown ones are ignored."""
        self._exits.end(rid)
        self._gathering.look_again()
        self._had_work = self._had_work and bool(self.requests)

    # --- drafts -------------------------------------------------------------------------------

    def take_block(self, drafter_id: str, block: DraftBlock | Malformed, now: float) -> None:
        """Match a block with the request that asked for it; else count why it is of no use."""
        self.take_blocks(drafter_id, [block], now)

    def take_blocks(
        self, drafter_id: str, blocks: Iterable[DraftBlock | Malformed], now: float
    ) -> None:
        """The same for the blocks of one frame, in less time."""
        self._sessions.take_all(drafter_id, self.requests, blocks, now)

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
        """When the next step should be handed over, as far as is known: past or now for at once,
        inf for "not before something happens". Ask again after whatever happens."""
        if self._exits.has_releases and not self._flights.steps and not self._roster.num_awaiting:
            return now
        return self._gathering.next_step_at(now)

    def ready_rows(self, now: float) -> list[LaneRequest]:
        """The rows of a step that goes now, longest waiting first. Late drafts are given up."""
        late = [r for r in self._roster.within(Phase.AWAITING).values() if r.due <= now]
        for request in late:
            self._sessions.expire(request, now)
        return self._gathering.ready_rows()

    # --- schedule and dispatch ----------------------------------------------------------------

    def schedule(self, rows: Sequence[LaneRequest], *, now: float) -> list[int]:
        """Draft tokens to verify per row of the step that goes now."""
        num_prefill = self._gathering.prefill_tokens(len(rows), now)
        load = self._gathering.load_of(rows, 0, num_prefill)
        room = max(self.lease.max_step_tokens - load.num_tokens, 0)
        return self._lengths.choose(rows, load=load, room=room)

    def dispatch(self, rows: Sequence[LaneRequest], lengths: Sequence[int], now: float) -> Step:
        """Form the step of these rows and draft lengths; from here on it is in the air."""
        assert len(self._flights.steps) < MOST, "one step runs, one waits"
        releases = self._exits.take_releases()
        step, flight = self._departures.form(rows, lengths, releases, now)
        self._counters.num_queued_steps += len(self._flights.steps) > 0
        self._flights.take_off(flight)
        return step

    # --- apply --------------------------------------------------------------------------------

    def apply(self, result: StepResult, now: float) -> list[Outcome]:
        """Account for a result and say what it means for each request.

        Raises:
            FrameError: not the result of the first step in the air, or ids that do not exist: this
                verifier cannot be trusted with anything.
        """
        flight = self._flights.steps[0] if self._flights.steps else None
        if flight is None or (result.lane_epoch, result.step_id) != (
            self.lease.lane_epoch,
            flight.step_id,
        ):
            raise FrameError(f"result of step {result.step_id}, which is not the next one due")
        gap_s = self._flights.gap_s(now, result.step_s)
        self._flights.land(now, result.step_s)
        if self._had_work:
            self._learning.gap(gap_s, self._asked.total())
        self._asked = flight.asked()
        outcomes = self._returns.settle(
            result, flight, now, asked=self._asked, behind=self._flights.steps
        )
        self._learning.step(result, flight, outcomes)
        self._gathering.pending_prefill = result.pending_prefill_tokens
        stalled = flight.num_prefill > 0 and result.num_real_tokens == 0
        if stalled and self._roster.within(Phase.PREFILLING):
            # Do not spin on a verifier that cannot go on.
            self._gathering.not_before = now + _STALL_PAUSE_S
        decoding = self._roster.within(Phase.AWAITING) or self._roster.within(Phase.READY)
        self._had_work = bool(decoding) or len(self._flights.steps) > 0
        self._gathering.look_again()
        return outcomes

    def _latency(self, drafter_id: str) -> Latency:
        """Of the blocks that the latest step to come back has asked this drafter for."""
        link = self._book.link(drafter_id)
        assert link is not None, "nobody waits for a drafter that is gone"
        num_blocks = max(self._asked[drafter_id], 1)  # behind a prompt, say, that no row asked for
        return Latency(link.latency_s(num_blocks), link.deviation_s)
