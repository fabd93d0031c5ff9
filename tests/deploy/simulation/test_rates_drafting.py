"""Queues at drafters, against a simulation of the queue itself."""

from __future__ import annotations

import math

import numpy as np
import pytest

from deploy.simulation.curves import DraftCurve
from deploy.simulation.rates_drafting import draft_delay

CURVE = DraftCurve(fixed_s=0.006, per_block_s=0.0001)


def test_an_unshared_drafter_never_makes_its_lane_wait() -> None:
    delay = draft_delay(CURVE, blocks=20, rows=0, own_per_s=50, others_per_s=0)
    assert delay.latency_s == pytest.approx(0.006 + 20 * 0.0001)
    assert delay.busy == pytest.approx(50 * 0.008)


def test_more_blocks_than_it_can_draft_never_end() -> None:
    delay = draft_delay(CURVE, blocks=100, rows=0, own_per_s=10, others_per_s=95)
    assert delay.latency_s == math.inf
    assert delay.busy == 1.0


def played(others_per_s: float, blocks: int, seed: int) -> float:
    """Mean latency of tagged bunches, far apart, among Poisson bunches of others."""
    rng = np.random.default_rng(seed)
    horizon = 2000.0
    tagged = np.arange(0.5, horizon, 0.5) + rng.uniform(0, 0.2, int(horizon / 0.5) - 1)
    others = np.cumsum(rng.exponential(1 / others_per_s, int(others_per_s * horizon * 1.1)))
    at = np.concatenate([tagged, others[others < horizon]])
    is_tagged = np.arange(len(at)) < len(tagged)
    order = np.argsort(at)
    at, is_tagged = at[order], is_tagged[order]
    free_s, first, latencies = 0.0, 0, []
    while first < len(at):
        start = max(free_s, at[first])
        last = max(int(np.searchsorted(at, start, side="right")), first + 1)
        free_s = start + CURVE.draft_s(blocks * (last - first))
        latencies += (free_s - at[first:last][is_tagged[first:last]]).tolist()
        first = last
    return float(np.mean(latencies))


@pytest.mark.parametrize("others_per_s", [10, 60, 150, 400, 800])
def test_latency_agrees_with_the_queue_played_out(others_per_s: float) -> None:
    delay = draft_delay(CURVE, blocks=8, rows=0, own_per_s=0, others_per_s=others_per_s)
    assert delay.latency_s == pytest.approx(played(others_per_s, 8, seed=1), rel=0.08)


def test_the_last_of_several_drafters_is_later_than_one() -> None:
    one = draft_delay(CURVE, blocks=8, rows=0, own_per_s=5, others_per_s=100)
    last = draft_delay(CURVE, blocks=8, rows=0, own_per_s=5, others_per_s=100, num_asked=4)
    assert one.latency_s < last.latency_s < 2.5 * one.latency_s
