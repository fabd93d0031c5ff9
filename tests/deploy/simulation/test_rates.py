"""The rate model against the event simulator, and against what must hold of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.config import SchedulingConfig
from deploy.simulation.curves import DraftCurve, StepCurve
from deploy.simulation.rates import LaneRates
from deploy.simulation.rates_pair import PairSpec, pair_of
from deploy.simulation.rates_pool import PoolRates
from deploy.simulation.scenario import load_scenario
from deploy.simulation.specs import DrafterSpec, VerifierSpec
from deploy.simulation.world import World

MIXED = VerifierSpec(curve=StepCurve(fixed_s=0.01, per_token_s=0.0001))


def scenario(
    curve: str,
    users: int,
    draft_s: float,
    *,
    policy: str = "adaptive",
    verifiers: int = 1,
) -> dict[str, Any]:
    """A closed loop, long enough for its mean to be one. Nothing is gated: a gate first has to
    learn, which the steady state does not show."""
    return {
        "duration_s": 12,
        "warmup_s": 3,
        "router": {"scheduling": {"policy": policy, "gate_drafts": False}},
        "verifier": {"curve": curve, "num_replicas": verifiers, "max_requests": 256},
        "drafter": {"curve": {"fixed_s": draft_s, "per_block_s": 0.00005}},
        "trace": {
            "kind": "staggered",
            "users": users,
            "prompt": {"mean": 64},
            "output": {"mean": 200},
        },
    }


GRID = [
    scenario("memory_bound", 32, 0.015),
    scenario("mixed", 32, 0.006),
    scenario("mixed", 32, 0.006, policy="fixed:2"),
    scenario("mixed", 32, 0.015, policy="lagged"),
    scenario("large", 64, 0.004, verifiers=2),
    scenario("compute_bound", 16, 0.015),
    scenario("compute_bound", 64, 0.015),
    scenario("compute_bound", 64, 0.006, verifiers=2),
]


def name_of(tree: dict[str, Any]) -> str:
    return f"{tree['verifier']['curve']}-{tree['trace']['users']}"


@pytest.mark.parametrize("tree", GRID, ids=name_of)
def test_agrees_with_the_event_simulator(tree: dict[str, Any]) -> None:
    one = load_scenario(tree)
    lanes, users = one.verifier.num_replicas, one.trace.users
    lane = LaneRates(pair_of(one), num_lanes=lanes, num_drafters=one.drafter.num_replicas)
    state = PoolRates(lane, num_lanes=lanes, most=-(-users // lanes)).closed(users)
    figures = World(one).run().figures()
    assert state.tokens_per_s == pytest.approx(figures["tokens_per_s"], rel=0.05)
    assert 1 + state.num_verified == pytest.approx(figures["budget"], rel=0.06)
    assert state.tau == pytest.approx(figures["accepted_length"], rel=0.05)


def test_whole_blocks_are_worth_the_acceptance_table() -> None:
    pair = PairSpec(verifier=MIXED, scheduling=SchedulingConfig(policy="full"))
    assert LaneRates(pair).at(64).tau == pytest.approx(
        float(pair.acceptance.accepted_length()[0]), rel=0.01
    )


def test_two_groups_where_steps_are_about_proportional_and_drafting_is_long() -> None:
    slow = DrafterSpec(curve=DraftCurve(fixed_s=0.03))
    # Plain decoding, whose steps follow each other without a way between them, is as quick there.
    drafted = SchedulingConfig(gate_drafts=False)
    pair = PairSpec(verifier=MIXED, drafter=slow, scheduling=drafted)
    memory = replace(pair, verifier=VerifierSpec(curve=StepCurve(memory_s=0.06, per_token_s=1e-6)))
    assert LaneRates(pair).at(64).num_groups >= 2
    assert LaneRates(memory).at(64).num_groups == 1


def test_gating_leaves_drafts_out_where_they_cost_more_than_they_bring() -> None:
    slow = DrafterSpec(curve=DraftCurve(fixed_s=0.5))
    pair = PairSpec(verifier=MIXED, drafter=slow)
    always = replace(pair, scheduling=SchedulingConfig(gate_drafts=False))
    assert LaneRates(pair).at(4).num_groups == 0
    assert LaneRates(pair).at(4).tokens_per_s > LaneRates(always).at(4).tokens_per_s


def test_wait_for_all_is_one_group() -> None:
    pair = PairSpec(verifier=MIXED, drafter=DrafterSpec(curve=DraftCurve(fixed_s=0.03)))
    waiting = replace(pair, scheduling=SchedulingConfig(gather="wait_for_all", gate_drafts=False))
    assert LaneRates(waiting).at(64).num_groups == 1


def test_a_drafter_on_the_verifiers_device_is_never_hidden() -> None:
    curve = DraftCurve(fixed_s=0.01)
    shared = PairSpec(verifier=MIXED, drafter=DrafterSpec(curve=curve, shares_verifier=True))
    one = LaneRates(shared).at(32)
    assert one.num_groups == 1
    assert one.cycle_s >= one.step_s + 0.01


def test_the_budget_falls_with_the_load() -> None:
    lane = LaneRates(PairSpec(verifier=MIXED))
    lengths = [lane.at(rows).num_verified for rows in (1, 8, 32, 128, 256)]
    assert [round(length, 1) for length in lengths] == sorted(
        (round(length, 1) for length in lengths), reverse=True
    )
    assert lengths[0] == pytest.approx(lane.pair.acceptance.gamma, abs=0.1)
    assert lengths[-1] < 2.5
