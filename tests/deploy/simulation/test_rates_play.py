"""Lanes played by counts: what must hold whatever chance does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.config import SchedulingConfig
from deploy.simulation.curves import DraftCurve, StepCurve
from deploy.simulation.rates import LaneRates, shapes
from deploy.simulation.rates_pair import PairSpec
from deploy.simulation.rates_play import Play
from deploy.simulation.rates_round import Round
from deploy.simulation.rates_steps import LengthMix
from deploy.simulation.specs import DrafterSpec, LinkSpec, VerifierSpec
from deploy.simulation.traces import LengthSpec

ALWAYS = SchedulingConfig(gate_drafts=False)
PAIR = PairSpec(
    verifier=VerifierSpec(curve=StepCurve(fixed_s=0.01, per_token_s=0.0001), jitter=0.0),
    drafter=DrafterSpec(curve=DraftCurve(fixed_s=0.006), jitter=0.0),
    link=LinkSpec(latency_s=0.0005, jitter_s=0.0),
    scheduling=ALWAYS,
)


def played(pair: PairSpec, num_requests: int, *, lanes: int = 1, drafters: int = 1) -> Round:
    return Play(
        pair, pair.steps(), num_requests=num_requests, num_lanes=lanes, num_drafters=drafters
    ).run()


def test_alone_a_round_is_a_step_a_draft_and_the_way() -> None:
    one = played(PAIR, 1)
    alone_s = one.step_s + 0.006 + 3 * 0.0005
    assert one.cycle_s == pytest.approx(alone_s, rel=0.02)
    assert one.verifier_busy == pytest.approx(one.step_s / one.cycle_s, abs=0.05)


def test_without_drafters_a_round_is_a_step_and_the_way() -> None:
    one = played(PAIR, 1, drafters=0)
    assert (one.tau, one.num_verified, one.num_groups) == (1.0, 0.0, 0)
    assert one.cycle_s == pytest.approx(one.step_s, rel=0.02)


def test_the_same_play_comes_out_the_same() -> None:
    assert played(PAIR, 12) == played(PAIR, 12)


def test_prompts_take_their_share_of_the_time() -> None:
    """A token of prompt costs what a token of decode does, once for every request."""
    compute = VerifierSpec(curve=StepCurve(fixed_s=0.001, per_token_s=0.0002), jitter=0.0)
    lengths = LengthMix(prompt=LengthSpec(mean=100), output=LengthSpec(mean=100))
    one = played(replace(PAIR, verifier=compute, lengths=lengths), 32)
    ended_per_step = one.prefill_tokens / 100
    rounds_per_step = one.num_decoding * one.step_interval_s / one.cycle_s
    assert ended_per_step == pytest.approx(rounds_per_step * one.tau / 99, rel=0.08)
    assert 0 < one.num_decoding < 32


def test_lanes_that_share_a_drafter_wait_for_each_other() -> None:
    slow = replace(PAIR, drafter=DrafterSpec(curve=DraftCurve(fixed_s=0.02)))
    alone, shared = (played(slow, 4, lanes=lanes) for lanes in (1, 4))
    assert shared.cycle_s > 1.1 * alone.cycle_s
    assert shared.drafter_busy > 0.9 > alone.drafter_busy


def test_a_lane_of_a_large_pool_is_that_of_a_small_one_like_it() -> None:
    assert shapes(3, 2) == [(3, 2, 1.0)]
    assert shapes(8, 8) == [(4, 4, 1.0)]
    assert shapes(40, 5) == [(8, 1, 1.0)]
    assert shapes(5, 0) == []
    for lanes, drafters in ((5, 1), (14, 4), (100, 130), (7, 40), (33, 2)):
        sizes = shapes(lanes, drafters)
        assert sum(share for *_, share in sizes) == pytest.approx(1)
        per_lane = [of / size for size, of, _ in sizes]
        assert min(per_lane) <= drafters / lanes <= max(per_lane)
    whole, part = (
        LaneRates(PAIR, num_lanes=4, num_drafters=2),
        LaneRates(PAIR, num_lanes=12, num_drafters=6),
    )
    assert whole.at(8) == part.at(8)
