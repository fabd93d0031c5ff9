"""The gather side of a lane: when its next step goes, who is in it, how much prompt beside. Pure.

`router.gather` has the rule itself; here it is fed with what the lane knows: its roster, the steps
in the air, the profiles of its verifier and drafters, and means of earlier rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cluster.config import SchedulingConfig
from cluster.wire import Lease
from router.drafter_book import DrafterBook
from router.flights import MOST, Flight, Flights
from router.gather import Crew, Regime, go_at, steady_regime
from router.lane_request import DECODING, LaneRequest, Phase
from router.link_profile import LinkProfile
from router.prompt_budget import chunk_tokens, least_chunk, stretch
from router.roster import Latency, Roster, Wave
from router.row_means import RowMeans
from router.slo import weights
from router.step_load import StepLoad
from router.throughput import ThroughputProfile


class Gathering:
    """Timing and make-up of the steps of one lane.

    Args:
        lease: limits of the verifier.
        prefill_budget: most prompt tokens per step.
        device: identity of the verifier's device; empty: not known, and no drafter's.
    """

    def __init__(
        self,
        *,
        lease: Lease,
        prefill_budget: int,
        profile: ThroughputProfile,
        book: DrafterBook,
        roster: Roster,
        flights: Flights,
        device: str = "",
    ) -> None:
        self.scheduling = SchedulingConfig()
        self.means = RowMeans()
        self.pending_prefill = 0
        """Prompt tokens that the verifier knows of and has yet to compute, by its last result."""
        self.not_before = 0.0
        """For steps without rows: no sooner than this."""
        self._max_step_tokens = lease.max_step_tokens
        self._most_prefill = min(prefill_budget, lease.max_step_tokens)
        self._profile = profile
        self._book = book
        self._roster = roster
        self._flights = flights
        self._device = device
        self._shares_device = False
        self._regime: Regime | None = None
        self._num_groups = 1
        self._mean_context = 0.0
        self._drafter_ids: set[str] = set()

    def look_again(self) -> None:
        """Requests came, went or moved on: the steady regime may be another one."""
        self._regime = None

    # --- when ---------------------------------------------------------------------------------

    def next_step_at(self, now: float) -> float:
        """See `LaneState.next_step_at`. Called after every block, so quick."""
        steps = self._flights.steps
        if steps:
            if len(steps) >= (MOST if self.scheduling.late_dispatch else 1):
                return math.inf
            free = self._flights.lands_at(now) - self._flights.lead_s
            if free > now:  # decided then
                return free if self._has_work else math.inf
            plain = any(flight.num_asked < len(flight.rows) for flight in steps)
            if plain and self.scheduling.gather != "when_free":
                # Plain rows are in every step: the next one goes ahead with those that are in the
                # air, or waits for them. Without them there would be two groups of them, and two
                # steps for one.
                return now if self._rows_ahead() else math.inf
        if self._roster.num_ready:
            return self._rows_go_at(now)
        if self.num_prompt_tokens():
            return self._prompts_go_at(now)
        return self._roster.first_due()

    @property
    def _has_work(self) -> bool:
        """Whether another step could be of use before something comes back."""
        rows = self._roster.num_ready + self._roster.num_awaiting
        return rows > 0 or self.num_prompt_tokens() > 0 or bool(self._rows_ahead())

    def _rows_go_at(self, now: float) -> float:
        """With some rows ready, and the verifier about to be free."""
        if self.scheduling.gather == "when_free":
            return now
        regime = self.regime
        # A step beside drafting on its own device would only slow both.
        if self.scheduling.gather == "wait_for_all" or self._shares_device:
            if any(flight.num_asked for flight in self._flights.steps):
                return math.inf
            return self._roster.first_due() if self._roster.num_awaiting else now
        num_blocks = self._roster.num_ready_blocks
        if num_blocks >= regime.group:
            return now
        return go_at(regime, num_ready=num_blocks, waves=self._waves(now), now=now)

    def _prompts_go_at(self, now: float) -> float:
        """With nothing but prompts to compute: while drafts are under way if there is time."""
        at = max(now, self.not_before)
        waves = self._waves(now)
        if not waves or self.scheduling.gather == "when_free":
            return at
        soonest = min(wave.expected for wave in waves)
        chunk = min(least_chunk(self._most_prefill), self.num_prompt_tokens())
        ends = max(at, self._flights.lands_at(now)) + self._profile.step_s(self._load(0, chunk))
        if ends <= soonest:
            return at
        return self._roster.first_due()

    def _waves(self, now: float) -> list[Wave]:
        """Blocks under way, and those that the steps in the air will ask for."""
        waves = [wave for wave in self._roster.waves if wave.due > now]
        for flight in self._flights.steps:
            if flight.num_asked:
                waves.append(self._wave_of(flight, now))
        return waves

    def _wave_of(self, flight: Flight, now: float) -> Wave:
        latency = self._latency(flight.num_asked)
        expected = self._flights.lands_at(now) + latency.mean_s
        return Wave(
            expected=expected,
            deviation_s=latency.deviation_s,
            due=math.inf,
            num_rows=flight.num_asked,
        )

    # --- who ----------------------------------------------------------------------------------

    def ready_rows(self) -> list[LaneRequest]:
        """The rows of a step that goes now, longest waiting first; then those that go ahead."""
        ready = sorted(self._roster.within(Phase.READY).values(), key=_by_age)
        room = self._max_step_tokens
        if self.num_prompt_tokens():  # prompts must not starve behind rows that fill the step
            room -= min(least_chunk(self._most_prefill), self.num_prompt_tokens(), room - 1)
        if self.scheduling.gather == "steady" and self.regime.num_groups > 1:
            ready = _at_most(ready, self.regime.group)
        return (ready + self._rows_ahead())[:room]

    def _rows_ahead(self) -> list[LaneRequest]:
        """Requests whose next row can go while the step in the air emits its anchor: where that is
        one token, whatever it is, and nothing else is worth waiting for.

        The verifier then finds its next step queued, and the router's time for a result is hidden.
        A request that the step ends has one row too many, which fails and is ignored.
        """
        steps = self._flights.steps
        if len(steps) != 1 or steps[0].num_asked or self._roster.num_awaiting:
            return []
        if self.scheduling.gather == "when_free":
            return []
        here = self._roster.within(Phase.IN_STEP)
        return [
            request
            for rid, row in steps[0].rows.items()
            if row.num_draft == 0
            and (request := here.get(rid)) is not None
            and request.block is None
            and request.remaining > 1
        ]

    # --- how much prompt ----------------------------------------------------------------------

    def num_prompt_tokens(self) -> int:
        """Prompt tokens that are left to compute when the steps in the air are back."""
        steps = self._flights.steps
        flying = sum(flight.num_admitted - flight.num_prefill for flight in steps)
        pending = max(self.pending_prefill + flying, 0)
        # Whatever the verifier says: none are left where no prompt is, some where one is not done.
        if not self._roster.within(Phase.PREFILLING):
            pending = 0
        elif not (pending or steps):
            pending = 1
        return pending + self._roster.num_queued_tokens

    def prefill_tokens(self, num_rows: int, now: float) -> int:
        """Prompt tokens that a step with so many rows, which goes now, may compute."""
        waiting = self.num_prompt_tokens()
        most = min(self._most_prefill, self._max_step_tokens - num_rows, max(waiting, 0))
        waves = self._waves(now) if num_rows == 0 else ()
        if num_rows == 0 and not waves:
            return most  # nobody decodes
        if num_rows:
            alone_s = self._profile.step_s(self._load(num_rows, 0))
            phases = (Phase.PREFILLING, Phase.QUEUED)
            share = stretch(
                self.scheduling.prefill_stretch,
                num_waiting=sum(len(self._roster.within(phase)) for phase in phases),
                num_decoding=num_rows,
            )
            limit_s = alone_s * (1 + share)
        else:
            starts = max(now, self._flights.lands_at(now))
            limit_s = min(wave.expected for wave in waves) - starts
        return chunk_tokens(
            lambda chunk: self._profile.step_s(self._load(num_rows, chunk)),
            limit_s=limit_s,
            least=least_chunk(self._most_prefill),
            most=most,
        )

    # --- what is known ------------------------------------------------------------------------

    @property
    def regime(self) -> Regime:
        """The steady regime of the present requests."""
        if self._regime is None:
            self._regime = self._find_regime()
            self._num_groups = self._regime.num_groups
        return self._regime

    def load_of(self, rows: Sequence[LaneRequest], num_draft: int, num_prefill: int) -> StepLoad:
        """What a step of these rows is made of."""
        return StepLoad(
            num_rows=len(rows),
            num_tokens=len(rows) + num_draft + num_prefill,
            num_prefill=num_prefill,
            sum_context=sum([len(request.ids) for request in rows]) + num_draft,
        )

    def _find_regime(self) -> Regime:
        decoding = [
            request for phase in DECODING for request in self._roster.within(phase).values()
        ]
        drafting_R = np.array([request.drafting for request in decoding], np.bool_)
        num_drafting = int(drafting_R.sum())
        num_plain = len(decoding) - num_drafting
        weight_R = weights(decoding)
        if decoding:
            self._mean_context = sum(len(r.ids) for r in decoding) / len(decoding)
        drafters = {r.drafter for r in decoding if r.drafter is not None}
        self._drafter_ids = {drafter.drafter_id for drafter in drafters}
        self._shares_device = self._device != "" and any(
            drafter.device == self._device for drafter in drafters
        )
        crew = Crew(
            num_drafting=num_drafting,
            num_plain=num_plain,
            tokens_per_row=self.means.num_emitted,
            drafting_weight=float(weight_R[drafting_R].mean()) if num_drafting else 1.0,
            plain_weight=float(weight_R[~drafting_R].mean()) if num_plain else 1.0,
            latency=self._latency(num_drafting),
            draft_s=self._draft_s,
            link_s=self._flights.link_s,
            turn_s=self._flights.turn_s if self.scheduling.late_dispatch else self._flights.link_s,
            shares_device=self._shares_device,
        )

        def step_s(num_rows: int) -> float:
            return self._profile.step_s(self._load(num_rows, 0, num_plain=num_plain))

        return steady_regime(crew, step_s, num_groups=self._num_groups)

    def _load(self, num_rows: int, num_prefill: int, *, num_plain: int = 0) -> StepLoad:
        """Of a step with so many mean drafting rows."""
        num_verify = round(num_rows * self.means.num_tokens) + num_plain
        return StepLoad(
            num_rows=num_rows + num_plain,
            num_tokens=max(num_verify + num_prefill, 1),
            num_prefill=num_prefill,
            sum_context=round((num_rows + num_plain) * self._mean_context) + num_prefill,
        )

    def _links(self) -> list[LinkProfile]:
        """To the drafters that the requests are bound to."""
        links = (self._book.link(drafter_id) for drafter_id in self._drafter_ids)
        return [link for link in links if link is not None]

    def _latency(self, num_blocks: int) -> Latency:
        """Of the drafters of the requests, the slowest counts."""
        links = self._links()
        each = -(-num_blocks // max(len(links), 1))
        latencies = [Latency(link.latency_s(each), link.deviation_s) for link in links]
        return max(latencies, default=Latency(0.0, 0.0))

    def _draft_s(self, num_blocks: int) -> float:
        """For how long a batch of so many blocks, shared out, keeps the slowest drafter busy."""
        links = self._links()
        each = -(-num_blocks // max(len(links), 1))
        return max((link.draft_s(each) for link in links), default=0.0)


def _by_age(request: LaneRequest) -> tuple[float, int]:
    return request.since, request.rid


def _at_most(rows: Sequence[LaneRequest], num_drafting: int) -> list[LaneRequest]:
    """Plain rows, and so many drafting ones, in order."""
    taken = []
    for request in rows:
        if request.drafting:
            if num_drafting == 0:
                continue
            num_drafting -= 1
        taken.append(request)
    return taken
