"""A verifier that knows how many requests it serves, not which: see `rates_play`."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np

from deploy.simulation.clock import Clock, Device, Link
from deploy.simulation.drafter import jitter
from deploy.simulation.rates_chance import Draws
from deploy.simulation.rates_curve import CountedCurve
from deploy.simulation.rates_drafter import Bunch, BunchTaker, CountedDrafter
from deploy.simulation.specs import VerifierSpec

_EMPTY_S: Final = 1e-4
"""A step without tokens, as `deploy.simulation.verifier` has it."""


class Prompt(NamedTuple):
    """A request that is to be served."""

    num_tokens: int
    drafter: int
    """Index of the drafter that it is bound to."""


@dataclass(frozen=True, kw_only=True)
class CountedStep:
    """What a lane hands to its verifier."""

    rows: Counter[int]
    """Verify rows, by drafter."""
    num_drafts: int
    tau: float
    """Tokens that a row emits, on average."""
    num_last: float
    """Rows that end with this step, on average."""
    prefill_budget: int
    admissions: Sequence[Prompt]
    drafting: bool
    ahead: bool = False
    """It holds the rows of the step before, which was not back: those that that one ended fail."""


@dataclass(frozen=True, kw_only=True)
class CountedResult:
    """What comes of it."""

    step: CountedStep
    num_rows: int
    """That were computed."""
    going: Counter[int]
    """Rows that go on, by drafter."""
    ended: Counter[int]
    """Those that do not."""
    begun: Counter[int]
    """Requests that had their first token."""
    num_prefill: int
    pending_prefill: int
    step_s: float
    asked_at: float
    """Names the blocks that were asked for."""

    @property
    def num_ended(self) -> int:
        """Requests."""
        return self.ended.total()


class ResultTaker(BunchTaker, Protocol):
    """A lane, as its verifier sees it."""

    def take_result(self, result: CountedResult) -> None:
        """A step is over."""
        ...


class CountedVerifier:
    """One replica: one step runs, one waits. Requests end by chance, as often as texts do."""

    def __init__(
        self,
        spec: VerifierSpec,
        curve: CountedCurve,
        *,
        clock: Clock,
        device: Device,
        drafters: Sequence[CountedDrafter],
        to_lane: Link,
        to_drafters: Link,
        draws: Draws,
        rng: np.random.Generator,
    ) -> None:
        self.device = device
        self.busy_s = 0.0
        self._spec = spec
        self._curve = curve
        self._clock = clock
        self._drafters = drafters
        self._to_lane = to_lane
        self._to_drafters = to_drafters
        self._draws = draws
        self._rng = rng
        self._prompts: deque[Prompt] = deque()
        self._lefts: deque[int] = deque()
        """Of each prompt: tokens left to compute."""
        self._steps: deque[CountedStep] = deque()
        self._running = False
        self._ended = Counter[int]()
        """Rows that the last step ended, by drafter."""
        self._lane: ResultTaker | None = None

    def serve(self, lane: ResultTaker) -> None:
        """Name who gets results."""
        self._lane = lane

    def take(self, step: CountedStep) -> None:
        """A frame of the lane."""
        self._steps.append(step)
        if not self._running:
            self._begin()

    def _begin(self) -> None:
        step = self._steps.popleft()
        self._running = True
        self._prompts.extend(step.admissions)
        self._lefts.extend(prompt.num_tokens for prompt in step.admissions)
        num_prefill, done = self._chunk(step.prefill_budget)
        rows = step.rows - self._ended if step.ahead else step.rows
        num_rows = rows.total()
        work_s = _EMPTY_S
        if num_rows + num_prefill:
            work_s = self._curve.step_s(num_rows, num_rows + step.num_drafts, num_prefill)
        work_s *= jitter(self._rng, self._spec.jitter)
        self.device.run(work_s, self._finish, step, rows, num_prefill, done, self._clock.now)

    def _chunk(self, budget: int) -> tuple[int, list[Prompt]]:
        """Spend a budget: tokens, and the prompts that are through."""
        left, done = budget, []
        while self._lefts and left:
            part = min(self._lefts[0], left)
            left -= part
            self._lefts[0] -= part
            if self._lefts[0]:
                break
            self._lefts.popleft()
            done.append(self._prompts.popleft())
        return budget - left, done

    def _finish(
        self,
        step: CountedStep,
        rows: Counter[int],
        num_prefill: int,
        done: list[Prompt],
        began_s: float,
    ) -> None:
        now, self._running = self._clock.now, False
        self.busy_s += now - began_s
        going = rows.copy()
        num_ended = min(self._draws.poisson(step.num_last), going.total())
        self._ended = Counter(_drawn(going, num_ended, self._rng))
        for drafter, count in self._ended.items():
            going[drafter] -= count
            if self._drafters:
                self._drafters[drafter].num_bound -= count
        assert self._lane is not None
        if step.drafting:
            self._ask(step, going, done, now)
        result = CountedResult(
            step=step,
            num_rows=rows.total(),
            going=going,
            ended=self._ended,
            begun=Counter(prompt.drafter for prompt in done),
            num_prefill=num_prefill,
            pending_prefill=sum(self._lefts),
            step_s=now - began_s,
            asked_at=now,
        )
        self._to_lane.send(self._lane.take_result, result)
        if self._steps:
            self._begin()

    def _ask(self, step: CountedStep, going: Counter[int], done: list[Prompt], now: float) -> None:
        """Blocks behind all that goes on, and behind the prompts that are through."""
        assert self._lane is not None
        blocks, rows = Counter(going), Counter[int]()
        for drafter, count in going.items():
            rows[drafter] += math.ceil(count * step.tau)
        for prompt in done:
            blocks[prompt.drafter] += 1
            rows[prompt.drafter] += prompt.num_tokens
        for drafter in sorted(blocks):
            if blocks[drafter]:
                bunch = Bunch(
                    lane=self._lane,
                    drafter=drafter,
                    asked_at=now,
                    num_blocks=blocks[drafter],
                    num_rows=rows[drafter],
                )
                self._to_drafters.send(self._drafters[drafter].take, bunch)


def _drawn(rows: Counter[int], num: int, rng: np.random.Generator) -> list[int]:
    """Drafters of so many rows, picked among all of them."""
    if not num:
        return []
    drafters = [drafter for drafter, count in rows.items() for _ in range(count)]
    picked: list[int] = rng.choice(drafters, num, replace=False).tolist()
    return picked
