"""When the next step goes, and with how many rows. Pure.

Two questions. *Which steady regime is best?* With k groups of rows that take turns, a cycle takes
``max(k T(R/k), T(R/k) + D)`` seconds: the verifier is either always busy, or waits for the drafts
of the one group, ``D`` seconds behind its result; and no cycle is shorter than what the drafters
need for k batches. One group wins where a step costs much by itself
(two half-full steps cost as much as two full ones), more groups win where steps are about
proportional to their rows, for then drafting hides behind verifying. *And now?* With fewer rows
ready than a group has, the lane waits for as long as the rows that it waits for are worth: the
tokens that they bring, less the seconds that they cost, at the rate of that regime.

All of it looks at load, the profiles and means of earlier rounds, never at a block (DESIGN section
5). Times in seconds, on the router's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from router.roster import Latency, Wave

_STICKY: Final = 0.05
"""A regime is left for one that is better by this share: none changes back and forth."""
_OUT_OF_STEP: Final = 0.04
"""What groups lose, as a share, for they never quite keep turns. Everybody together does not."""
_HOPELESS: Final = 1.3
"""More groups are not looked at once a cycle takes so much longer than the best."""

_TAIL: Final = 3.0
"""Mean deviations behind the mean within which a block is late as blocks are."""

StepTime = Callable[[int], float]
"""Seconds of a step with so many drafting rows, a mean one each, beside everything else in it."""


@dataclass(frozen=True, kw_only=True)
class Crew:
    """Who takes part in the rounds, and what they get out of one, from earlier rounds."""

    num_drafting: int
    """Requests that ask for blocks."""
    num_plain: int
    """Requests that decode without: they are in every step."""
    tokens_per_row: float
    """That the round of a drafting request emits, at least 1."""
    drafting_weight: float = 1.0
    plain_weight: float = 1.0
    """Of a token of a mean request of either kind."""
    latency: Latency
    """Of their blocks, from the result of a step."""
    draft_s: Callable[[int], float] = lambda num_blocks: 0.0
    """For how long a batch of so many blocks keeps a drafter busy: it takes one after the other."""
    link_s: float = 0.0
    """To the verifier and back."""
    turn_s: float = 0.0
    """From one step to the next if that is ready in time."""
    shares_device: bool = False
    """Whether drafting takes from the verifier what it computes: then nothing hides behind a step.
    """


@dataclass(frozen=True, kw_only=True)
class Regime:
    """A way to go on for ever."""

    num_groups: int
    group: int
    """Drafting rows of a step: with as many it goes at once, and with no more if others then wait
    for nothing."""
    rate: float
    """Weighted tokens per second."""
    patience_s: float
    """How long it pays to wait for one row more."""


def steady_regime(crew: Crew, step_s: StepTime, *, num_groups: int) -> Regime:
    """The regime of most tokens per second.

    Args:
        num_groups: of the regime so far, which is kept if it is about as good.
    """
    if crew.num_drafting == 0:
        return Regime(num_groups=1, group=0, rate=0.0, patience_s=0.0)
    best, best_rate, best_score = 1, 0.0, 0.0
    for k in _group_counts(crew.num_drafting):
        rate = _rate(crew, step_s, k)
        score = rate * (1 + _STICKY) if k == num_groups else rate
        if k > 1:
            score *= 1 - _OUT_OF_STEP
        if score > best_score:
            best, best_rate, best_score = k, rate, score
        elif score * _HOPELESS < best_score:
            break
    group = -(-crew.num_drafting // best)
    row_s = max(step_s(group) - step_s(0), 0.0) / group
    return Regime(
        num_groups=best,
        group=group,
        rate=best_rate,
        patience_s=max(crew.drafting_weight * crew.tokens_per_row / best_rate - row_s, 0.0),
    )


def go_at(regime: Regime, *, num_ready: int, waves: Sequence[Wave], now: float) -> float:
    """When the next step goes if nothing else comes; ``now`` for at once.

    Args:
        num_ready: drafting rows in hand.
        waves: drafts under way, and those that the running step will ask for.
        now: the verifier is free, or as good as.
    """
    until = now
    if num_ready >= regime.group:
        return until
    num_coming = 0
    if len(waves) > 1:
        waves = sorted(waves, key=_by_time)
    for wave in waves:
        num_coming += wave.num_rows
        patience_s = num_coming * regime.patience_s
        if _left_s(wave, now) < patience_s:
            until = max(until, wave.expected + _TAIL * wave.deviation_s + patience_s)
    return until


def _by_time(wave: Wave) -> float:
    return wave.expected


def _left_s(wave: Wave, now: float) -> float:
    """How long the blocks of a wave still take, their last ones a deviation longer than the mean.

    What is overdue takes another deviation, again and again, but past a few of them something has
    happened, and doubt grows with time.
    """
    overdue_s = now - wave.expected
    usual_s = wave.deviation_s
    return max(usual_s - overdue_s, usual_s, overdue_s - _TAIL * usual_s)


def _rate(crew: Crew, step_s: StepTime, k: int) -> float:
    """Weighted tokens per second with k groups, all but the last of the same size."""
    group = -(-crew.num_drafting // k)
    num_full, rest = divmod(crew.num_drafting, group)
    one_s = step_s(group)
    num_steps = num_full + (rest > 0)
    busy_s = num_full * one_s + (step_s(rest) if rest else 0.0) + num_steps * crew.turn_s
    if crew.shares_device:
        busy_s += num_steps * crew.latency.mean_s
    alone_s = one_s + crew.link_s + crew.latency.mean_s + crew.latency.deviation_s
    drafters_s = num_full * crew.draft_s(group) + (crew.draft_s(rest) if rest else 0.0)
    cycle_s = max(busy_s, alone_s, drafters_s)
    drafted = crew.num_drafting * crew.drafting_weight * crew.tokens_per_row
    return (drafted + num_steps * crew.num_plain * crew.plain_weight) / cycle_s


def _group_counts(most: int) -> Iterator[int]:
    """1, 2, 3, 4, 6, 9, ... and ``most``."""
    k = 1
    while k < most:
        yield k
        k = max(k + 1, k * 3 // 2)
    yield most
