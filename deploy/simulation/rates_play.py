"""Rounds of a pool in the steady state, played by counts: the middle way between events and sums.

What a lane yields hangs on how its rows fall into step: groups that the gather rule keeps apart or
brings together, lanes that meet at a drafter, prompts that meet in a step. No sum over regimes has
that. So the lanes are played on the virtual clock, by the gather rule that serves, over engines
that know how many requests they have but not which: a step is a few numbers, its lengths and tokens
are those of the mean step at its rows (`deploy.simulation.rates_steps`). That is a hundred times
quicker than the events of all requests.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from deploy.simulation.clock import Clock, Device, Link
from deploy.simulation.rates_chance import Draws, Lengths
from deploy.simulation.rates_curve import CountedCurve
from deploy.simulation.rates_drafter import CountedDrafter
from deploy.simulation.rates_lane import CountedLane
from deploy.simulation.rates_pair import PairSpec
from deploy.simulation.rates_round import Round
from deploy.simulation.rates_steps import StepSampler
from deploy.simulation.rates_tally import LaneTally
from deploy.simulation.rates_verifier import CountedVerifier

_WARMUP: Final = 24
_COUNTED: Final = 240
"""Steps of a lane; fewer where there are several lanes ..."""
_FEWEST: Final = 60
"""... but not fewer than that."""


class Play:
    """Some lanes and their drafters, each lane with the same number of requests."""

    def __init__(
        self,
        pair: PairSpec,
        steps: StepSampler,
        *,
        num_requests: int,
        num_lanes: int,
        num_drafters: int,
    ) -> None:
        self._pair = pair
        self._steps = steps
        self._num_requests = num_requests
        self._clock = Clock()
        self._rngs = np.random.default_rng([num_requests, num_lanes, num_drafters])
        lengths = pair.lengths
        # Of all lanes together: what each of them draws in a short play is not level yet.
        self._draws = Draws(self._rng())
        self._prompts = Lengths(lengths.prompt, self._rng())
        self._curve = CountedCurve(
            pair.verifier.curve,
            mean_context=lengths.mean_context,
            prompt_context=lengths.prompt.mean / 2,
            most=pair.verifier.max_step_tokens,
        )
        self.verifier_devices = [Device(self._clock, f"verifier-{n}") for n in range(num_lanes)]
        self._drafters = [self._drafter(number) for number in range(num_drafters)]
        self._tallies = [LaneTally() for _ in range(num_lanes)]
        self._verifiers: list[CountedVerifier] = []
        self._lanes = [self._lane(number) for number in range(num_lanes)]

    def run(self) -> Round:
        """Play until enough steps are counted."""
        self._start()
        self._until(_WARMUP)
        began_s, num_lanes = self._clock.now, len(self._lanes)
        for tally in self._tallies:
            tally.clear(began_s)
        before_s = self._busy_s()
        self._until(_WARMUP + max(_COUNTED // num_lanes, _FEWEST))
        span_s = self._clock.now - began_s
        shares = [
            (after - before) / span_s
            for before, after in zip(before_s, self._busy_s(), strict=True)
        ]
        played = Round.of(
            self._tallies,
            num_requests=self._num_requests,
            verifier_busy=_mean(shares[:num_lanes]),
            drafter_busy=_mean(shares[num_lanes:]),
            drafting=bool(self._drafters),
        )
        return self._levelled(played)

    def _levelled(self, played: Round) -> Round:
        """With as many prompt tokens as the emitted ones make due: a play has few prompts, and how
        many fall into it is chance (a control variate)."""
        lengths, curve = self._pair.lengths, self._curve
        rows = played.tokens_per_s * played.step_interval_s / played.tau
        due = rows * played.tau * lengths.prompt.mean / max(lengths.output.mean - 1, 1.0)
        num_rows, num_tokens = round(rows), round(rows * (1 + played.num_verified))
        chunk = max(round(due), 1)
        chunk_s = curve.step_s(num_rows, num_tokens, chunk) - curve.step_s(num_rows, num_tokens, 0)
        more_s = max(due - played.prefill_tokens, -due) * chunk_s / chunk
        return replace(
            played,
            cycle_s=played.cycle_s * (1 + more_s / played.step_interval_s),
            step_s=played.step_s + more_s,
            step_interval_s=played.step_interval_s + more_s,
            prefill_tokens=due,
        )

    def _start(self) -> None:
        """All in the middle of their decode, spread over about a round."""
        spread_s = self._curve.step_s(self._num_requests, self._num_requests, 0)
        spread_s += self._pair.drafter.curve.fixed_s
        for lane in self._lanes:
            for at_s in np.sort(self._rngs.random(self._num_requests)) * spread_s:
                self._clock.at(float(at_s), lane.join)

    def _busy_s(self) -> list[float]:
        """Of the verifiers, then of the drafters."""
        verifiers = [verifier.busy_s for verifier in self._verifiers]
        return verifiers + [drafter.busy_s for drafter in self._drafters]

    def _until(self, num_steps: int) -> None:
        """Play until the slowest lane has had so many steps."""
        look_s = self._curve.step_s(1, 1, 0)
        while min(tally.num_steps for tally in self._tallies) < num_steps:
            self._clock.run(self._clock.now + look_s)

    def _drafter(self, number: int) -> CountedDrafter:
        own = self._pair.drafter.shares_verifier
        devices = self.verifier_devices
        device = Device(self._clock, f"drafter-{number}")
        return CountedDrafter(
            number,
            self._pair.drafter,
            clock=self._clock,
            device=devices[number % len(devices)] if own else device,
            to_lanes=self._link(),
            bound_s=self._pair.draft_timeout_s,
            rng=self._rng(),
        )

    def _lane(self, number: int) -> CountedLane:
        verifier = CountedVerifier(
            self._pair.verifier,
            self._curve,
            clock=self._clock,
            device=self.verifier_devices[number],
            drafters=self._drafters,
            to_lane=self._link(),
            to_drafters=self._link(),
            draws=self._draws,
            rng=self._rng(),
        )
        self._verifiers.append(verifier)
        return CountedLane(
            self._pair,
            self._steps,
            self._curve,
            clock=self._clock,
            verifier=verifier,
            drafters=self._drafters,
            to_verifier=self._link(),
            draws=self._draws,
            prompts=self._prompts,
            tally=self._tallies[number],
        )

    def _link(self) -> Link:
        link = self._pair.link
        return Link(self._clock, self._rng(), latency_s=link.latency_s, jitter_s=link.jitter_s)

    def _rng(self) -> np.random.Generator:
        return self._rngs.spawn(1)[0]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
