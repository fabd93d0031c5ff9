"""Pools under random arrivals."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from deploy.simulation.curves import StepCurve
from deploy.simulation.rates import LaneRates
from deploy.simulation.rates_days import Deployment, Interval, PoolSize
from deploy.simulation.rates_pair import PairSpec, pair_of
from deploy.simulation.rates_pool import PoolRates, Target
from deploy.simulation.scenario import load_scenario
from deploy.simulation.specs import VerifierSpec
from deploy.simulation.world import World

PAIR = PairSpec(verifier=VerifierSpec(curve=StepCurve(fixed_s=0.01, per_token_s=0.0001)))


@pytest.fixture(scope="module")
def pool() -> PoolRates:
    return PoolRates(LaneRates(PAIR), num_lanes=2, most=32)


def test_the_law_balances_arrivals_and_departures(pool: PoolRates) -> None:
    rate = 0.8 * pool.capacity
    law = pool.stationary(rate)
    n = np.arange(len(law), dtype=np.float64)
    assert law.sum() == pytest.approx(1)
    # Detailed balance: as many go from n to n + 1 as come back.
    np.testing.assert_allclose(law[:-1] * rate, law[1:] * pool.finished_per_s(n[1:]), atol=1e-12)
    assert float(law @ pool.finished_per_s(n)) == pytest.approx(rate * (1 - law[-1]), rel=1e-6)


def test_everything_is_worse_with_more_load(pool: PoolRates) -> None:
    target = Target(ttft_s=0.3, tokens_per_s=50)
    states = [pool.state(share * pool.capacity, target) for share in (0.2, 0.5, 0.8, 0.95, 1.2)]
    for lighter, heavier in itertools.pairwise(states):
        assert heavier.user_tokens_per_s[1] < lighter.user_tokens_per_s[1]
        assert heavier.ttft_s[1] > lighter.ttft_s[1]
        assert heavier.attainment <= lighter.attainment
        assert heavier.num_waiting >= lighter.num_waiting
    assert states[-1].requests_per_s == pytest.approx(pool.capacity, rel=0.01)
    assert states[-1].attainment < 0.01


def test_open_traffic_agrees_with_the_event_simulator() -> None:
    tree = {
        "duration_s": 50,
        "warmup_s": 10,
        "verifier": {"curve": "mixed", "max_requests": 64},
        "router": {"scheduling": {"gate_drafts": False}},
        "drafter": {"curve": {"fixed_s": 0.006, "per_block_s": 0.00005}},
        "trace": {
            "kind": "poisson",
            "rate": 9.0,
            "prompt": {"mean": 128},
            "output": {"mean": 160},
        },
    }
    one = load_scenario(tree)
    played = World(one).run().figures()
    # What was asked for in those seconds, not its mean in the long run.
    rate = played["tokens_per_s"] / 160
    state = PoolRates(LaneRates(pair_of(one)), num_lanes=1, most=64).state(rate)
    assert state.num_decoding == pytest.approx(played["requests"]["mean_running"], rel=0.2)
    assert state.user_tokens_per_s[1] == pytest.approx(played["user_tokens_per_s"]["p50"], rel=0.1)
    assert state.tau == pytest.approx(played["accepted_length"], rel=0.05)
    assert state.ttft_s[0] == pytest.approx(played["ttft_s"]["p50"], rel=0.3)


def test_a_backlog_grows_by_what_is_not_served_and_is_worked_off() -> None:
    deployment = Deployment(PAIR, target=Target(ttft_s=1.0), most_waiting=100_000)
    size = PoolSize(verifiers=1, drafters=1)
    capacity = deployment.pool(size).capacity
    low, high = 0.5 * capacity, 1.5 * capacity
    day = deployment.play([low] * 5 + [high] * 5 + [low] * 20, interval_s=60, size=size)
    peak = day[9].num_requests - day[4].num_requests
    assert peak == pytest.approx(5 * 60 * 0.5 * capacity, rel=0.1)
    assert day[-1].num_requests == pytest.approx(day[4].num_requests, rel=0.01)
    arrived = 60 * sum(interval.arrivals_per_s for interval in day)
    served = 60 * sum(interval.state.requests_per_s for interval in day)
    assert served == pytest.approx(arrived, rel=0.02)
    assert day[4].state.ttft_attainment > 0.99
    assert day[9].state.ttft_attainment < 0.01


def test_what_the_queue_cannot_hold_is_refused() -> None:
    deployment = Deployment(PAIR, target=Target(), most_waiting=10)
    size = PoolSize(verifiers=1, drafters=1)
    capacity = deployment.pool(size).capacity
    (interval,) = deployment.play([2 * capacity], interval_s=600, size=size)
    assert interval.refused_per_s == pytest.approx(capacity, rel=0.05)


def test_a_scaler_keeps_up_with_a_swing() -> None:
    deployment = Deployment(PAIR, target=Target(ttft_s=0.5))
    capacity = deployment.pool(PoolSize(verifiers=1, drafters=1)).capacity

    def scaler(played: list[Interval]) -> PoolSize:
        wanted = -(-played[-1].arrivals_per_s // (0.7 * capacity))
        return PoolSize(verifiers=max(int(wanted), 1), drafters=1)

    rates = [capacity * (1 + 0.8 * np.sin(i / 4)) for i in range(24)]
    small = PoolSize(verifiers=1, drafters=1)
    fixed = deployment.play(rates, interval_s=60, size=small)
    scaled = deployment.play(rates, interval_s=60, size=small, scaler=scaler)
    assert max(i.num_requests for i in scaled) < max(i.num_requests for i in fixed)
    assert {i.size.verifiers for i in scaled} >= {1, 2}
