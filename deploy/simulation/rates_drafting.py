"""How long a drafter takes that several lanes share: a queue with batches, in mean values. Pure.

A drafter computes one batch at a time and takes in all that waits when it starts the next. Lanes
send a *bunch* at a time: the blocks that one verify step asks of this drafter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from deploy.simulation.curves import DraftCurve

_ROUNDS: Final = 200
_CLOSE: Final = 1e-4


@dataclass(frozen=True, kw_only=True)
class DraftDelay:
    """What a bunch meets at its drafter."""

    latency_s: float
    """From the commit's arrival to the block's departure; inf if the drafter cannot keep up."""
    busy: float
    """Share of its time that the drafter computes."""


def draft_delay(
    curve: DraftCurve,
    *,
    blocks: float,
    rows: float,
    own_per_s: float,
    others_per_s: float,
    num_asked: float = 1.0,
) -> DraftDelay:
    """Mean latency of the last of the bunches that a step sends to different drafters.

    The others come like a Poisson stream. A bunch that meets an idle drafter is computed at once;
    one that meets a batch waits for the rest of it (a uniform part, as batches are alike), then
    shares the next one with all that came meanwhile. The mean batch solves
    ``k = v d(k) + exp(-v d(k))``: what comes while a batch runs, or the one that ends the idling.

    Args:
        curve: of the drafter.
        blocks: of a bunch; a fraction is a mean.
        rows: committed positions that come with it.
        own_per_s: bunches of the lane in question: it has one on its way at most, so it never
            waits for itself.
        others_per_s: bunches of the other lanes.
        num_asked: drafters that the step asks.
    """

    def seconds(bunches: float) -> float:
        return (
            curve.fixed_s
            + curve.per_block_s * max(blocks * bunches, 1.0)
            + curve.per_row_s * rows * bunches
        )

    slope = curve.per_block_s * blocks + curve.per_row_s * rows
    if (own_per_s + others_per_s) * slope >= 1:
        return DraftDelay(latency_s=math.inf, busy=1.0)
    batch = 1.0
    for _ in range(_ROUNDS):
        during = others_per_s * seconds(batch)
        grown = max(during + math.exp(-during), 1.0)
        if abs(grown - batch) < _CLOSE * batch:
            break
        batch = grown
    met = min(others_per_s * seconds(batch) / batch, 1.0)
    shared = seconds(1 + others_per_s * seconds(batch))
    late = max(num_asked * met, 1.0)  # of the bunches meet a batch, if any does
    rest_s = seconds(batch) * late / (late + 1)
    any_met = 1 - (1 - met) ** num_asked
    latency_s = (1 - any_met) * seconds(1) + any_met * (rest_s + shared)
    busy = min(met + own_per_s * seconds(1) * (1 - met), 1.0)
    return DraftDelay(latency_s=latency_s, busy=busy)
