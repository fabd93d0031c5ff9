"""For how many requests, and down to which survival, drafts raise tokens per second most. Pure.

For n = 0..C requests asked, ranked by what their blocks are worth at each level, the rate of

* one group: all rows, then all drafting, ``(R + A) / (T(R + N) + drafting)``;
* two groups by turns, where drafting hides behind the other group's step and rows without a draft
  are in every step: ``(2 R - n + A) / max(2 T(half), T(half) + drafting)``;

with tokens weighed by what they are worth (`router.slo`).

The lane's gather rule (`router.gather`) then finds out by itself which of them it is in.

Shape legend: C candidates, n = 0..C of them asked, L levels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from router.draft_cost import Drafting
from router.draft_worth import Worth
from router.step_load import StepLoad

F64 = NDArray[np.float64]
Bools = NDArray[np.bool_]


class StepTimes(Protocol):
    """As much of a throughput profile as decisions here need."""

    def curve_s(self, base: StepLoad, max_tokens: int) -> F64:
        """Seconds of the step ``base`` grown by draft tokens, by tokens in all, 0..max_tokens."""
        ...


@dataclass(frozen=True, kw_only=True)
class Round:
    """What a round of the lane is like, whoever is asked."""

    load: StepLoad
    """A step of everything that is decoded, without drafts."""
    times: StepTimes
    room: int
    """Draft tokens that fit into a step."""
    total_weight: float
    """Of a token of each request that is decoded, summed."""
    gap_s: float
    """Between two steps, drafting apart."""
    slow_down: Callable[[F64], F64] = np.ones_like
    """How many times longer than predicted rounds take, by share of rows drafted for."""
    takes_turns: bool = False
    """Whether there may be two groups."""


@dataclass(frozen=True, kw_only=True)
class DraftPlan:
    """The best that a lane can expect of a round."""

    chosen: Bools
    """[C]"""
    accepted: float
    """Drafts that the chosen ones' blocks are expected to give."""
    gain: float
    """Tokens per second over those of plain decoding."""
    gains: F64
    """[C + 1] the same if the best n = 0..C are asked."""
    plain_s: float
    """Seconds of a plain round."""


def best_plan(
    worth: Worth,
    levels: F64,
    drafting: Drafting,
    facts: Round,
    *,
    weight_C: F64,
    least_gain: float,
) -> DraftPlan:
    """The plan of the highest rate, or to ask for nothing.

    Args:
        worth: of the candidates' blocks, [C, L].
        levels: [L] survival down to which drafts are verified.
        drafting: what it takes, priced.
        weight_C: of a token of each.
        least_gain: rate over that of plain decoding for which anything is asked.
    """
    order_CL = np.argsort(
        levels * worth.verified - weight_C[:, None] * worth.accepted, axis=0, kind="stable"
    )
    accepted_nL = _sums(worth.accepted, order_CL)
    verified_nL = _sums(worth.verified, order_CL)
    weight_nL = _sums(weight_C[:, None] * worth.accepted, order_CL)
    rate_nL = _one_group(weight_nL, verified_nL, drafting, facts)
    if facts.takes_turns and facts.load.num_rows > 1:
        rows_nL = _sums(np.broadcast_to(weight_C[:, None], order_CL.shape), order_CL)
        turns_nL = _two_groups(weight_nL, verified_nL, rows_nL, drafting, facts)
        np.maximum(rate_nL, turns_nL, out=rate_nL)
    rate_nL[1:][verified_nL[1:] > facts.room] = 0.0
    plain = float(rate_nL[0, 0])
    n, level = divmod(int(rate_nL.argmax()), rate_nL.shape[1])
    if rate_nL[n, level] < least_gain * plain:
        n, level = 0, 0
    chosen_C = np.zeros(len(weight_C), np.bool_)
    chosen_C[order_CL[:n, level]] = True
    return DraftPlan(
        chosen=chosen_C,
        accepted=float(accepted_nL[n, level]),
        gain=float(rate_nL[n, level]) / plain,
        gains=rate_nL.max(axis=1) / plain,
        plain_s=facts.total_weight / plain,
    )


def _one_group(weight_nL: F64, verified_nL: F64, drafting: Drafting, facts: Round) -> F64:
    """Weighted tokens per second [n, L]."""
    load = facts.load
    round_nL = _step_s(facts, load, load.num_tokens + verified_nL)
    round_nL += (facts.gap_s + drafting.latency_s)[:, None]
    round_nL *= facts.slow_down(np.arange(len(round_nL)) / load.num_rows)[:, None]
    round_nL += drafting.priced_s[:, None]
    rate_nL: F64 = (facts.total_weight + weight_nL) / round_nL
    return rate_nL


def _two_groups(
    weight_nL: F64, verified_nL: F64, rows_nL: F64, drafting: Drafting, facts: Round
) -> F64:
    """Weighted tokens per second [n, L]; 0 for n = 0.

    Args:
        rows_nL: weight of a token of each row that is asked, summed: one token less than the plain
            ones have.
    """
    load = facts.load
    asked_n = np.arange(len(verified_nL))
    tokens_nL = load.num_tokens - asked_n[:, None] / 2 + verified_nL / 2
    half = StepLoad(
        num_rows=(load.num_rows + 1) // 2,
        num_tokens=(load.num_rows + 1) // 2 + load.num_prefill,
        num_prefill=load.num_prefill,
        sum_context=load.sum_context // 2,
    )
    # A step has all plain rows and half of the others: between a whole step and half a one.
    share_n = (asked_n / load.num_rows)[:, None]
    whole_nL, half_nL = _step_s(facts, load, tokens_nL), _step_s(facts, half, tokens_nL)
    step_nL = (1 - share_n) * whole_nL + share_n * half_nL + facts.gap_s
    latency_n = drafting.latency_s[(asked_n + 1) // 2]
    cycle_nL = step_nL + np.maximum(step_nL, latency_n[:, None]) + drafting.priced_s[:, None]
    rate_nL: F64 = (2 * facts.total_weight - rows_nL + weight_nL) / cycle_nL
    rate_nL[0] = 0.0
    return rate_nL


def _step_s(facts: Round, load: StepLoad, tokens_nL: F64) -> F64:
    """Seconds of steps of so many tokens, fractions between the neighbours."""
    curve = facts.times.curve_s(load, math.ceil(float(tokens_nL.max())))
    seconds_nL: F64 = np.interp(tokens_nL, np.arange(len(curve)), curve)
    return seconds_nL


def _sums(values_CL: F64, order_CL: NDArray[np.int64]) -> F64:
    """Of the first n = 0..C rows in their order, [n, L]."""
    total_nL = np.zeros((len(values_CL) + 1, values_CL.shape[1]))
    np.cumsum(np.take_along_axis(values_CL, order_CL, axis=0), axis=0, out=total_nL[1:])
    return total_nL
