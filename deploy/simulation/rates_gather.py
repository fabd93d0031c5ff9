"""When a lane goes that knows how many requests it has, not which: the gather rule by counts. Pure.

`router.gathering` feeds the rule (`router.gather`) from the requests of a lane; here it is fed from
their numbers, with the same profiles of the road and of the drafters (`router.flights`,
`router.link_profile`).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence

from deploy.simulation.rates_curve import CountedCurve
from deploy.simulation.rates_drafter import CountedDrafter
from deploy.simulation.rates_pair import PairSpec
from deploy.simulation.rates_tally import LaneTally
from deploy.simulation.rates_verifier import CountedStep, Prompt
from router.flights import MOST, Flights
from router.gather import Crew, Regime, go_at, steady_regime
from router.prompt_budget import chunk_tokens, least_chunk, stretch
from router.roster import Latency, Wave
from router.row_means import RowMeans


class CountedGathering:
    """Timing and size of the steps of one lane, from the numbers that the lane keeps here.

    Args:
        drafters: all of the pool; empty: nobody drafts.
        shares_device: whether one of them is on the verifier's.
        curve: of the verifier.
    """

    def __init__(
        self,
        pair: PairSpec,
        curve: CountedCurve,
        *,
        drafters: Sequence[CountedDrafter],
        shares_device: bool,
        tally: LaneTally,
    ) -> None:
        self.flights = Flights()
        self.flying: deque[CountedStep] = deque()
        """The same steps, as the verifier has them."""
        self.means = RowMeans()
        self.num_decoding = 0
        self.num_ready = 0
        self.waves: dict[tuple[int, float], Wave] = {}
        """Blocks under way, by drafter and the time at which the verifier asked."""
        self.num_asked = Counter[int]()
        """Blocks that the latest step to come back has asked for, by drafter."""
        self.queued: list[Prompt] = []
        """Requests that the verifier does not know of."""
        self.pending_prefill = 0
        """Prompt tokens that it knows of and has yet to compute."""
        self._pair = pair
        self._curve = curve
        self._drafters = drafters
        self._shares_device = shares_device
        self._tally = tally
        self._scheduling = pair.scheduling
        self._drafting = bool(drafters)
        self._most_prefill = min(pair.prefill_budget, pair.verifier.max_step_tokens)
        self._regime: Regime | None = None
        self._num_groups = 1

    def look_again(self) -> None:
        """The steady regime may be another one."""
        self._regime = None

    def prefill_tokens(self, num_rows: int, now: float) -> int:
        """Prompt tokens that a step of so many rows may carry, if there are as many."""
        most = min(self._most_prefill, self._pair.verifier.max_step_tokens - num_rows)
        waves = [] if num_rows else self._coming(now)
        if not num_rows and not waves:
            return most
        if num_rows:
            share = stretch(
                self._scheduling.prefill_stretch,
                num_waiting=self.num_prompt_tokens() / self._pair.lengths.prompt.mean,
                num_decoding=num_rows,
            )
            limit_s = self._usual_s(num_rows, 0) * (1 + share)
        else:
            limit_s = min(w.expected for w in waves) - max(now, self.flights.lands_at(now))
        return chunk_tokens(
            lambda chunk: self._usual_s(num_rows, chunk),
            limit_s=limit_s,
            least=least_chunk(self._most_prefill),
            most=most,
        )

    def next_step_at(self, now: float) -> float:
        """When the next step goes, as `router.gathering.Gathering` has it."""
        steps = self.flights.steps
        if steps:
            if len(steps) >= (MOST if self._scheduling.late_dispatch else 1):
                return math.inf
            free = self.flights.lands_at(now) - self.flights.lead_s
            if free > now:
                has_work = (
                    self.num_ready or self.waves or self.num_prompt_tokens() or self.rows_ahead
                )
                return free if has_work else math.inf
            plain = any(
                flight.num_asked < step.rows.total()
                for flight, step in zip(steps, self.flying, strict=True)
            )
            if plain and self._scheduling.gather != "when_free":
                return now if self.rows_ahead else math.inf
        if self.num_ready:
            return self._rows_go_at(now)
        if self.num_prompt_tokens():
            return self._prompts_go_at(now)
        return math.inf

    @property
    def rows_ahead(self) -> Counter[int]:
        """Of the step in the air, those that go on before it is back: all where nobody drafts."""
        if self._drafting or len(self.flying) != 1 or self._scheduling.gather == "when_free":
            return Counter()
        return self.flying[0].rows

    def _rows_go_at(self, now: float) -> float:
        if self._scheduling.gather == "when_free" or not self._drafting:
            return now
        if self._scheduling.gather == "wait_for_all" or self._shares_device:
            asked = any(flight.num_asked for flight in self.flights.steps)
            return math.inf if asked or self.waves else now
        regime = self.steady()
        if self.num_ready >= regime.group:
            return now
        return go_at(regime, num_ready=self.num_ready, waves=self._coming(now), now=now)

    def _prompts_go_at(self, now: float) -> float:
        waves = self._coming(now)
        if not waves or self._scheduling.gather == "when_free":
            return now
        soonest = min(wave.expected for wave in waves)
        chunk = min(least_chunk(self._most_prefill), self.num_prompt_tokens())
        ends = max(now, self.flights.lands_at(now)) + self._usual_s(0, chunk)
        return now if ends <= soonest else math.inf

    def _coming(self, now: float) -> list[Wave]:
        waves = list(self.waves.values())
        for flight in self.flights.steps:
            if flight.num_asked:
                latency = self._latency(flight.num_asked)
                waves.append(
                    Wave(
                        expected=self.flights.lands_at(now) + latency.mean_s,
                        deviation_s=latency.deviation_s,
                        due=math.inf,
                        num_rows=flight.num_asked,
                    )
                )
        return waves

    def num_prompt_tokens(self) -> int:
        """Left to compute when the steps in the air are back."""
        flying = sum(flight.num_admitted - flight.num_prefill for flight in self.flights.steps)
        queued = sum(prompt.num_tokens for prompt in self.queued)
        return max(self.pending_prefill + flying, 0) + queued

    # --- what is known ------------------------------------------------------------------------

    def steady(self) -> Regime:
        """The steady regime of the present requests."""
        if self._regime is None:
            crew = Crew(
                num_drafting=self.num_decoding,
                num_plain=0,
                tokens_per_row=self.means.num_emitted,
                latency=self._latency(self.num_decoding),
                draft_s=self._draft_s,
                link_s=self.flights.link_s,
                turn_s=(
                    self.flights.turn_s if self._scheduling.late_dispatch else self.flights.link_s
                ),
                shares_device=self._shares_device,
            )
            self._regime = steady_regime(
                crew, lambda rows: self._usual_s(rows, 0), num_groups=self._num_groups
            )
            self._num_groups = self._regime.num_groups
            self._tally.regime(self._num_groups)
        return self._regime

    def _usual_s(self, num_rows: int, num_prefill: int) -> float:
        """Of a step of mean rows."""
        num_verify = num_rows
        if self._drafting:
            num_verify = round(num_rows * self.means.num_tokens)
        return self._curve.step_s(num_rows, num_verify, num_prefill)

    def wave_latency(self, drafter: int) -> Latency:
        """Of the blocks that the latest step to come back has asked this drafter for."""
        profile = self._drafters[drafter].profile
        return Latency(profile.latency_s(max(self.num_asked[drafter], 1)), profile.deviation_s)

    def _latency(self, num_blocks: int) -> Latency:
        """Of so many blocks shared out, the slowest drafter counts."""
        each = -(-num_blocks // max(len(self._drafters), 1))
        return max(
            (Latency(d.profile.latency_s(each), d.profile.deviation_s) for d in self._drafters),
            default=Latency(0.0, 0.0),
        )

    def _draft_s(self, num_blocks: int) -> float:
        each = -(-num_blocks // max(len(self._drafters), 1))
        return max((d.profile.draft_s(each) for d in self._drafters), default=0.0)
