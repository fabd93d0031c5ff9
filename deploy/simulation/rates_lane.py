"""A lane that knows how many requests it has, not which: its round, by counts. Pure.

Who is in which state is told apart by drafter alone.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from deploy.simulation.clock import Clock, Link
from deploy.simulation.rates_chance import Draws, Lengths
from deploy.simulation.rates_curve import CountedCurve
from deploy.simulation.rates_drafter import Bunch, CountedDrafter
from deploy.simulation.rates_gather import CountedGathering
from deploy.simulation.rates_pair import PairSpec
from deploy.simulation.rates_steps import StepSampler
from deploy.simulation.rates_tally import LaneTally
from deploy.simulation.rates_verifier import CountedResult, CountedStep, CountedVerifier, Prompt
from router.flights import Flight
from router.roster import Wave

_GAP_GAIN: Final = 0.05
"""As `router.throughput` has it."""
_MOST_TOLD: Final = 4
"""Blocks of a bunch that the link profile is told of: it is settled by then."""
_LOOKS_AGAIN: Final = 4
"""Steps until the regime is looked at anew though as many decode as before."""


class CountedLane:
    """One lane in a closed loop of requests: whoever ends is replaced at once.

    Args:
        drafters: all of the pool; empty: nobody drafts.
        curve: of the verifier.
        draws: of steps that a row which is about to end is in.
    """

    def __init__(
        self,
        pair: PairSpec,
        steps: StepSampler,
        curve: CountedCurve,
        *,
        clock: Clock,
        verifier: CountedVerifier,
        drafters: Sequence[CountedDrafter],
        to_verifier: Link,
        draws: Draws,
        prompts: Lengths,
        tally: LaneTally,
    ) -> None:
        self._pair = pair
        self._scheduling = pair.scheduling
        self._steps = steps
        self._curve = curve
        self._clock = clock
        self._verifier = verifier
        self._drafters = drafters
        self._to_verifier = to_verifier
        self._draws = draws
        self._prompts = prompts
        self._tally = tally
        self._drafting = bool(drafters)
        shares_device = any(d.device is verifier.device for d in drafters)
        self._gathering = CountedGathering(
            pair, curve, drafters=drafters, shares_device=shares_device, tally=tally
        )
        self._overhead_s = 0.0
        self._ready: deque[tuple[int, int]] = deque()
        """Drafter and number of rows, in the order in which they became so."""
        self._left_over = 0.0
        """Of a draft: whole ones are verified, their mean need not be whole."""
        self._early: dict[tuple[int, float], Bunch] = {}
        self._unusual: set[tuple[int, float]] = set()
        """Waves with a block behind a prompt: what the link profile does not learn from."""
        self._had_work = False
        self._armed_s = math.inf
        verifier.serve(self)

    # --- requests -----------------------------------------------------------------------------

    def add(self) -> None:
        """A request whose prompt is yet to be computed."""
        self._gathering.queued.append(Prompt(self._prompts.next(), self._bind()))

    def join(self) -> None:
        """A request in the middle of its decode."""
        self._gathering.num_decoding += 1
        self._gathering.look_again()
        self._ready.append((self._bind(), 1))
        self._gathering.num_ready += 1
        self.pump()

    def _bind(self) -> int:
        if not self._drafters:
            return 0
        drafter = min(self._drafters, key=lambda one: one.num_bound)
        drafter.num_bound += 1
        return drafter.number

    # --- the round ----------------------------------------------------------------------------

    def pump(self) -> None:
        """Hand over every step that is due; wake up when the next one is."""
        while True:
            now = self._clock.now
            at = self._gathering.next_step_at(now)
            if at > now:
                if at < self._armed_s:
                    self._armed_s = at
                    self._clock.at(at, self._wake, at)
                return
            self._dispatch(now)

    def take_result(self, result: CountedResult) -> None:
        """A step is over."""
        now, flights = self._clock.now, self._gathering.flights
        if self._had_work:
            gap_s = flights.gap_s(now, result.step_s)
            self._overhead_s += _GAP_GAIN * (gap_s - self._overhead_s)
        flights.land(now, result.step_s)
        step = self._gathering.flying.popleft()
        num_rows = result.num_rows
        grown = result.begun.total() - result.num_ended
        self._gathering.num_decoding += grown
        self._gathering.pending_prefill = result.pending_prefill
        if step.drafting:
            self._gathering.means.learn(
                num_rows, num_rows + step.num_drafts, round(num_rows * step.tau)
            )
            self._gathering.num_asked = step.rows
        self._settle(result, now)
        for _ in range(result.num_ended):
            self.add()
        self._had_work = self._gathering.num_decoding > 0 or bool(self._gathering.flying)
        if grown or not self._tally.num_steps % _LOOKS_AGAIN:
            self._gathering.look_again()
        self._tally.step(now, result, num_rows, self._gathering.num_decoding)
        self.pump()

    def take_blocks(self, bunch: Bunch, draft_s: float) -> None:
        """Blocks have come."""
        key = bunch.drafter, bunch.asked_at
        if key not in self._gathering.waves:  # before the result that they follow
            self._early[key] = bunch
            return
        wave = self._gathering.waves.pop(key)
        if key in self._unusual:
            self._unusual.remove(key)
        else:
            now = self._clock.now
            told = min(bunch.num_blocks, _MOST_TOLD)
            for _ in range(told):
                self._drafters[bunch.drafter].profile.observe(
                    bunch.num_blocks, draft_s, now - wave.key[1], weight=1 / told
                )
        self._make_ready(bunch.drafter, bunch.num_blocks)
        self.pump()

    def _settle(self, result: CountedResult, now: float) -> None:
        """Rows are ready, or wait for their blocks."""
        flying = self._gathering.flying
        gone = bool(flying) and flying[0].ahead
        if gone:
            flying[0] = replace(flying[0], rows=flying[0].rows - result.ended)
        rows = result.begun if gone else result.going + result.begun
        for drafter, count in sorted(rows.items()):
            if not result.step.drafting:
                self._make_ready(drafter, count)
                continue
            key = drafter, result.asked_at
            if result.begun[drafter]:
                self._unusual.add(key)
            latency = self._gathering.wave_latency(drafter)
            self._gathering.waves[key] = Wave(
                key=("", now),
                expected=now + latency.mean_s,
                deviation_s=latency.deviation_s,
                due=math.inf,
                num_rows=count,
            )
            if (bunch := self._early.pop(key, None)) is not None:
                del self._gathering.waves[key]
                self._unusual.discard(key)
                self._make_ready(drafter, bunch.num_blocks)

    def _make_ready(self, drafter: int, count: int) -> None:
        self._ready.append((drafter, count))
        self._gathering.num_ready += count

    def _wake(self, at: float) -> None:
        if at == self._armed_s:
            self._armed_s = math.inf
            self.pump()

    # --- dispatch -----------------------------------------------------------------------------

    def _dispatch(self, now: float) -> None:
        ahead = self._gathering.rows_ahead
        rows = self._take_rows() + ahead
        num_rows = rows.total()
        granted = self._gathering.prefill_tokens(num_rows, now)
        chunk = min(granted, self._gathering.num_prompt_tokens())
        mean = self._steps.mean(num_rows, self._overhead_s, drafting=self._drafting, chunk=chunk)
        wanted = num_rows * mean.num_verified + self._left_over
        num_drafts = round(wanted)
        self._left_over = wanted - num_drafts
        num_drafts = min(num_drafts, self._pair.verifier.max_step_tokens - num_rows - chunk)
        step = CountedStep(
            rows=rows,
            num_drafts=num_drafts,
            tau=mean.tau,
            num_last=num_rows * mean.ends,
            prefill_budget=chunk,
            admissions=self._gathering.queued,
            drafting=self._drafting,
            ahead=bool(ahead),
        )
        # In a round at whose start one or two tokens are left, a row does not ask; every number
        # of tokens is left at the start of one round in tau.
        at_end = self._draws.poisson(2 * num_rows * mean.ends / mean.tau) if num_rows else 0
        self._gathering.flights.take_off(
            Flight(
                step_id=0,
                rows={},
                blocks={},
                drafting=frozenset(),
                rebound=frozenset(),
                num_asked=num_rows - min(at_end, num_rows) if self._drafting else 0,
                num_admitted=sum(prompt.num_tokens for prompt in self._gathering.queued),
                num_prefill=chunk,
                sent=now,
                predicted_s=self._curve.step_s(num_rows, num_rows + num_drafts, chunk),
            )
        )
        self._tally.granted(granted)
        self._gathering.flying.append(step)
        self._gathering.queued = []
        self._to_verifier.send(self._verifier.take, step)

    def _take_rows(self) -> Counter[int]:
        left = self._gathering.num_ready
        if self._scheduling.gather == "steady" and self._drafting:
            regime = self._gathering.steady()
            left = min(left, regime.group) if regime.num_groups > 1 else left
        rows = Counter[int]()
        self._gathering.num_ready -= left
        while left:
            drafter, count = self._ready.popleft()
            taken = min(count, left)
            rows[drafter] += taken
            left -= taken
            if taken < count:
                self._ready.appendleft((drafter, count - taken))
        return rows
