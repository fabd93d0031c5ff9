"""Rounds of a lane in the steady state: what it yields at a given concurrency, without events.

With R requests decoding, a lane plays one of these regimes, and the gather rule picks the best:

    plain       cycle = T_v(R)                                      nobody waits for drafts
    one group   cycle = T_v(R, l) + T_d + RTT                       drafting is exposed
    k groups    cycle = max(k T_v(R/k, l), k T_d, T_v(R/k, l) + T_d + RTT)    drafting hides

The lengths l come from the very policies that serve (`router.policies`), over blocks drawn from the
acceptance model, with the exposed time of the regime in their step times, as a lane has it. T_d
holds the queue at drafters that several lanes share (`deploy.simulation.rates_drafting`), so it
depends on the cycle: a fixed point. Prompt chunks ride along as often as requests turn over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from deploy.simulation.rates_drafting import draft_delay
from deploy.simulation.rates_pair import PairSpec
from deploy.simulation.rates_steps import MeanStep, StepSampler

_TURNS: Final = 3
"""Of the fixed point of lengths and exposed time."""
_HALVINGS: Final = 24
_HOPELESS: Final = 1.3
"""More groups are not looked at once they yield so much less than the best (as `router.gather`)."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """The steady round of a lane."""

    rows: int
    num_groups: int
    """0: nobody drafts."""
    cycle_s: float
    """Between two rounds of a request."""
    step_s: float
    """Mean of a step, prompt chunks included."""
    tau: float
    """Tokens of a round."""
    num_verified: float
    """Drafts verified per row."""
    prefill_tokens: float
    """Prompt tokens per step."""
    chunk_s: float
    """Of a step that carries a prompt chunk."""
    most_chunk: int
    """Prompt tokens that a step can carry."""
    verifier_busy: float
    """Share of the time."""
    drafter_busy: float

    @property
    def tokens_per_s(self) -> float:
        """Of the lane."""
        return self.rows * self.tau / self.cycle_s

    @property
    def tokens_per_s_user(self) -> float:
        """Of one request, after its first token."""
        return self.tau / self.cycle_s

    @property
    def step_interval_s(self) -> float:
        """From step to step of the lane."""
        return self.cycle_s / max(self.num_groups, 1)


class LaneRates:
    """Steady rounds of a lane, by concurrency; each is worked out once.

    Args:
        pair: verifier, drafter, texts, links.
        num_lanes: verifiers that share the drafters.
        num_drafters: the rows of each lane are spread over them all.
        steps: of ``pair``; pools of other sizes may share them.
    """

    def __init__(
        self,
        pair: PairSpec,
        *,
        num_lanes: int = 1,
        num_drafters: int = 1,
        steps: StepSampler | None = None,
    ) -> None:
        self.pair = pair
        self.steps = steps or pair.steps()
        self._num_lanes = num_lanes
        self._num_drafters = num_drafters
        self._rounds: dict[int, Round] = {}

    def at(self, rows: int) -> Round:
        """The round that the lane settles in with so many requests decoding (1 or more)."""
        if rows not in self._rounds:
            self._rounds[rows] = self._best(rows)
        return self._rounds[rows]

    def tokens_per_request(self, tau: float) -> float:
        """Tokens that rounds have to yield for a request of mean length: all but the first, which
        its prefill gives, and what the last round accepts beyond the end, half a round."""
        return max(self.pair.lengths.output.mean - 1, 0.0) + (tau - 1) / 2

    def _best(self, rows: int) -> Round:
        scheduling, drafter = self.pair.scheduling, self.pair.drafter
        plain = self._round(rows, 0)
        if scheduling.policy == "none" or not self._num_drafters:
            return plain
        one = self._round(rows, 1)
        if scheduling.gather == "wait_for_all":
            return one
        best, groups = one, 1
        while groups < rows and not drafter.shares_verifier:
            groups = min(max(groups + 1, groups * 3 // 2), rows)
            more = self._round(rows, groups)
            if more.tokens_per_s * _HOPELESS < best.tokens_per_s:
                break
            best = max(best, more, key=lambda regime: regime.tokens_per_s)
        if scheduling.gate_drafts and plain.tokens_per_s > best.tokens_per_s:
            return plain
        return best

    def _round(self, rows: int, num_groups: int) -> Round:
        """The fixed point of one regime."""
        num_steps, drafting = max(num_groups, 1), num_groups > 0
        size = rows / num_steps
        exposed_s = 3 * self.pair.hop_s
        for _ in range(_TURNS if drafting else 1):
            plain = self.steps.mean(size, exposed_s, drafting=drafting, chunk=0)
            most_chunk = self.steps.most_chunk(size, plain.num_verified)
            prefill = min(self._prefill_per_step(size, plain.tau), float(most_chunk))
            tokens, share = self.steps.chunks(most_chunk, prefill)
            chunk = self.steps.mean(size, exposed_s, drafting=drafting, chunk=tokens)
            step = plain.mixed(chunk, share)
            cycle_s, busy = self._cycle(step, size, num_groups)
            exposed_s = max(cycle_s / num_steps - step.step_s, 0.0)
        return Round(
            rows=rows,
            num_groups=num_groups,
            cycle_s=cycle_s,
            step_s=step.step_s,
            tau=step.tau,
            num_verified=step.num_verified,
            prefill_tokens=prefill,
            chunk_s=chunk.step_s,
            most_chunk=most_chunk,
            verifier_busy=min(num_steps * step.step_s / cycle_s, 1.0),
            drafter_busy=busy,
        )

    def _prefill_per_step(self, size: float, tau: float) -> float:
        """Prompt tokens that come with the requests which these rows make room for."""
        turnover = size * tau / self.tokens_per_request(tau)
        return turnover * self.pair.lengths.prompt.mean

    def _rows_per_block(self, tau: float) -> float:
        """Positions that a drafter takes in: what a round committed, and the prompts of requests
        that come."""
        turnover = tau / self.tokens_per_request(tau)
        return tau + turnover * self.pair.lengths.prompt.mean

    def _cycle(self, step: MeanStep, size: float, num_groups: int) -> tuple[float, float]:
        """Seconds of a round and the share of it that a drafter is busy.

        A longer cycle means fewer blocks per second, hence a shorter queue at the drafter: one
        crossing, found by halving.
        """
        hop_s, step_s = self.pair.hop_s, step.step_s
        if num_groups == 0:
            return step_s + 2 * hop_s, 0.0
        # Groups that keep apart are drafted one after the other, as they are verified.
        asked = min(float(self._num_drafters), size)
        blocks, rows = size / asked, size / asked * self._rows_per_block(step.tau)
        curve = self.pair.drafter.curve
        draft_s = curve.fixed_s + curve.per_block_s * blocks + curve.per_row_s * rows
        least = num_groups * max(step_s, draft_s)
        if num_groups > 1 and not self.pair.scheduling.late_dispatch:
            least += num_groups * 2 * hop_s

        def played(cycle_s: float) -> tuple[float, float]:
            own_per_s = num_groups * asked / self._num_drafters / cycle_s
            delay = draft_delay(
                curve,
                blocks=blocks,
                rows=rows,
                own_per_s=own_per_s,
                others_per_s=own_per_s * (self._num_lanes - 1),
                num_asked=asked,
            )
            return max(least, step_s + delay.latency_s + 3 * hop_s), delay.busy

        low = high = max(least, step_s + 3 * hop_s)
        while played(high)[0] > high:
            high *= 2
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if played(middle)[0] > middle else (low, middle)
        return high, played(high)[1]
