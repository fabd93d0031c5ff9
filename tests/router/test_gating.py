"""What the draft gate asks for, and what that is worth, in rounds on a virtual clock."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from router.draft_outlook import Decoding
from router.step_load import StepLoad
from tests.router.gate_world import ONE_GROUP, GateWorld, Text, mixed, steady

ALWAYS = dataclasses.replace(ONE_GROUP, gate_drafts=False)

MEMORY_BOUND = {"step_s": lambda n: 20e-3 + 0.05e-3 * n, "latency_s": lambda n: 4e-3 + 2e-5 * n}
SHARED_CORES = {
    "step_s": lambda n: 30e-3 + 7e-3 * n,
    "latency_s": lambda n: 12e-3 + 5e-3 * n,
    "shared": True,
}
COMPUTE_BOUND = {"step_s": lambda n: 2e-3 + 0.4e-3 * n, "latency_s": lambda n: 4e-3 + 2e-5 * n}


def plain_rate(world: GateWorld, num_requests: int) -> float:
    return num_requests / world.step_s(num_requests)


def make(text: Text, num_requests: int, **options: Any) -> GateWorld:
    world = GateWorld(text=text, **options)
    world.resize(num_requests)
    return world


@pytest.mark.parametrize("costs", [MEMORY_BOUND, SHARED_CORES, COMPUTE_BOUND])
@pytest.mark.parametrize("num_requests", [1, 4, 16, 64])
@pytest.mark.parametrize(
    "text", [steady(0.15), steady(0.6), steady(0.9), mixed(0.1, 0.95)], ids=str
)
def test_about_as_good_as_the_better_of_drafting_and_not(
    costs: dict[str, Any], num_requests: int, text: Text
) -> None:
    gated = make(text, num_requests, **costs)
    always = make(text, num_requests, scheduling=ALWAYS, **costs)
    for world in (gated, always):
        world.run(max(300 // num_requests, 50))  # the first rounds are for learning
    num_rounds = max(600 // num_requests, 150)
    best = max(plain_rate(gated, num_requests), always.run(num_rounds))
    assert gated.run(num_rounds) > 0.95 * best


def test_a_request_that_is_worth_it_is_drafted_for_among_others_that_are_not() -> None:
    def text(request: Any, random: np.random.Generator) -> float:
        return 0.97 if request.rid % 8 == 0 else 0.05

    costs = {"step_s": lambda n: 10e-3 + 0.5e-3 * n, "latency_s": lambda n: 1e-3 + 0.4e-3 * n}
    world = make(text, 16, **costs)
    world.run(100)
    before = [len(request.ids) for request in world.requests]
    rate = world.run(200)
    grown = np.array([len(r.ids) for r in world.requests]) - before
    assert rate > 1.1 * plain_rate(world, 16)
    assert grown[[0, 8]].min() > 3 * 200
    assert np.mean(world.num_asked[-200:]) < 6


def test_drafting_is_back_within_a_few_rounds_when_the_load_falls() -> None:
    world = make(steady(0.75), 64, **SHARED_CORES)
    world.run(60)
    assert np.mean(world.num_asked[-40:]) < 0.1 * 64, "at 64 it does not pay"
    for _ in range(3):  # the second time the light load is not new any more
        world.resize(1)
        world.run(3)
        rate = world.run(100)
        assert np.mean(world.num_asked[-100:]) > 0.8
        assert rate > 1.15 * plain_rate(world, 1)
        world.resize(64)
        world.run(20)
        assert np.mean(world.num_asked[-10:]) < 0.3 * 64


@pytest.mark.parametrize("num_requests", [1, 4])
def test_drafting_is_back_when_the_text_becomes_predictable(num_requests: int) -> None:
    easy = [0.02]
    world = make(lambda request, random: easy[0], num_requests, **SHARED_CORES)
    world.run(250)
    assert np.mean(world.num_asked[-100:]) < 0.15 * num_requests
    easy[0] = 0.97
    world.run(800)  # a probe of most rows costs much: it is rare
    assert np.mean(world.num_asked[-50:]) > 0.5 * num_requests
    easy[0] = 0.02
    world.run(240)
    assert np.mean(world.num_asked[-30:]) < 0.5 * num_requests


def test_what_is_asked_does_not_flap_where_it_makes_no_difference() -> None:
    """Near break-even the state of a lane changes rarely, not from round to round."""
    world = make(steady(0.5), 8, step_s=lambda n: 10e-3 + 1e-3 * n, latency_s=lambda n: 3.3e-3)
    world.run(100)
    world.num_asked.clear()
    world.run(600)
    asked = np.array(world.num_asked) > 4
    assert np.count_nonzero(asked[1:] != asked[:-1]) < 60


def test_a_load_that_swings_keeps_between_its_two_steady_rates() -> None:
    world = make(steady(0.75), 24, **SHARED_CORES)
    world.run(100)
    light = make(steady(0.75), 2, **SHARED_CORES)
    light.run(100)
    low, high = sorted([world.run(200), light.run(200)])
    rates, asked = [], []
    for _ in range(15):
        for num in (2, 24):
            world.resize(num)
            rates.append(world.run(10))
            asked.append(np.mean(world.num_asked[-10:]) / num)
    assert np.mean(asked[6::2]) > 0.9, "both loads are known by now"
    assert np.mean(asked[7::2]) < 0.1
    assert np.mean(rates[6::2]) > 0.9 * low
    assert np.mean(rates[7::2]) > 0.97 * high


def test_a_slow_down_on_a_shared_device_is_found_and_charged() -> None:
    """Latency alone says that drafting pays; steps that take 1.6 times as long say it does not."""
    costs = {"step_s": lambda n: 20e-3 + 1e-3 * n, "latency_s": lambda n: 2e-3, "slow_down": 1.6}
    world = make(steady(0.7), 8, shared=True, **costs)
    world.run(400)
    rate = world.run(300)
    assert world.gate.figures()["slow_down"] > 1.15, "as much as it takes to know better"
    assert rate > 0.96 * plain_rate(world, 8)
    elsewhere = make(steady(0.7), 8, shared=False, **(costs | {"slow_down": 1.0}))
    elsewhere.run(200)
    assert elsewhere.run(200) > 1.15 * plain_rate(world, 8)
    assert elsewhere.gate.figures()["slow_down"] == pytest.approx(1.0, abs=0.02)


def test_a_price_on_drafting_is_charged() -> None:
    asked = {}
    for price in (0.0, 20.0):
        scheduling = dataclasses.replace(ONE_GROUP, draft_price=price)
        world = make(steady(0.6), 4, scheduling=scheduling, **MEMORY_BOUND)
        world.run(200)
        asked[price] = np.mean(world.num_asked[-100:])
    assert asked[0.0] > 3.9
    assert asked[20.0] < 0.5


def test_a_drafter_that_promises_too_much_is_not_believed() -> None:
    world = make(steady(0.1), 8, promise=lambda p: 0.9, **SHARED_CORES)
    world.run(100)
    assert world.run(400) > 0.94 * plain_rate(world, 8)
    assert world.gate.figures()["greedy.honesty"] < 0.5


def test_blocks_that_come_too_late_are_worth_nothing() -> None:
    world = make(steady(0.9), 4, late=True, **MEMORY_BOUND)
    world.run(80)
    assert np.mean(world.num_asked[-30:]) < 1.0


def test_turned_off_it_asks_for_everything_and_none_is_gated() -> None:
    world = make(steady(0.02), 8, scheduling=ALWAYS, **SHARED_CORES)
    world.run(50)
    assert world.num_asked == [8] * 50
    assert world.counters.num_drafts_gated == 0
    world.gate.configure(ONE_GROUP)
    world.run(200)
    assert np.mean(world.num_asked[-100:]) < 1.5
    assert world.counters.num_drafts_gated > 0


def test_probes_are_rare_where_they_cost_and_are_counted() -> None:
    world = make(steady(0.02), 16, **SHARED_CORES)
    world.run(100)
    world.num_asked.clear()
    before = world.counters.num_draft_probes
    rate = world.run(1000)
    share = np.mean(world.num_asked) / 16
    assert 0 < share < 0.03
    assert rate > 0.985 * plain_rate(world, 16)
    assert world.counters.num_draft_probes - before == sum(world.num_asked)


def test_probes_are_as_rare_as_catching_up_before_them_is_dear() -> None:
    """What the plan expects of a drafted round says nothing of it: it has to be seen."""
    shares = []
    for catch_up_s in (0.0, 5e-5):
        world = make(steady(0.02), 16, catch_up_s=catch_up_s, **SHARED_CORES)
        world.run(1500)
        world.num_asked.clear()
        rate = world.run(4000)
        shares.append(np.mean(np.array(world.num_asked) > 0))
        assert shares[-1] > 0
        assert rate > 0.985 * plain_rate(world, 16)
    assert shares[1] < 0.5 * shares[0]


def test_only_probes_count_as_such() -> None:
    """Not rounds of a lane whose gate is off, nor those of one that drafts because it pays."""
    world = make(steady(0.02), 16, **SHARED_CORES)
    world.run(300)
    seen = dict(world.gate._losses._num)
    assert sum(seen.values()) > 0
    world.gate.configure(ALWAYS)
    world.run(200)
    more = sum(world.gate._losses._num.values()) - sum(seen.values())
    assert more <= 1, "a probe that was under way"
    assert not world.gate._tried | world.gate._on_trial
    pays = make(steady(0.9), 4, **SHARED_CORES)
    pays.run(300)
    assert np.mean(pays.num_asked[-200:]) > 3.5
    assert not pays.gate._losses._num


def test_a_probe_whose_blocks_do_not_come_counts_too() -> None:
    world = make(steady(0.02), 16, **SHARED_CORES)
    world.run(300)
    before = sum(world.gate._losses._num.values())
    world.late = True
    world.run(1000)
    assert sum(world.gate._losses._num.values()) > before


def test_the_same_history_gives_the_same_decisions() -> None:
    runs = [make(mixed(0.3, 0.8), 8, seed=3, **COMPUTE_BOUND) for _ in range(2)]
    for world in runs:
        world.run(300)
    assert runs[0].num_asked == runs[1].num_asked
    assert len(set(runs[0].num_asked)) > 1


def test_the_first_block_goes_by_the_load_that_is_there() -> None:
    world = make(steady(0.75), 48, **SHARED_CORES)
    world.run(60)
    newcomer = world._request(rid=1000)
    crowd = Decoding(
        load=StepLoad(num_rows=49, num_tokens=49),
        times=world.profile,
        room=500,
        others=world.requests,
    )
    assert world.gate.ask_first([newcomer], crowd) == [False]
    alone = Decoding(load=StepLoad(num_rows=1, num_tokens=1), times=world.profile, room=500)
    willing, unwilling = world._request(rid=1001), world._request(rid=1002, draft=False)
    assert world.gate.ask_first([willing, unwilling], alone) == [True, False]


def test_what_was_expected_comes_true() -> None:
    world = make(mixed(0.2, 0.9), 16, **MEMORY_BOUND)
    world.run(50)
    counters = world.counters
    expected, tokens = counters.expected_gain, world.num_tokens
    world.run(600)
    gain = world.num_tokens - tokens - 600 * 16
    assert counters.expected_gain - expected == pytest.approx(gain, rel=0.15)


def test_nothing_is_kept_of_requests_that_ended() -> None:
    world = make(steady(0.6), 8, **COMPUTE_BOUND)
    world.run(20)
    world.resize(0)
    gate = world.gate
    assert not gate._asked | gate._chosen | gate._probed | gate._promised.keys()
    assert not gate._tried | gate._on_trial
    assert gate._worth._rows == {}
    world.resize(8)
    assert len(gate._worth._weight) == 16, "table rows are used again"


def test_a_lane_without_drafts_asks_a_few_rows_to_know_what_texts_are_worth() -> None:
    world = make(steady(0.02), 64, **SHARED_CORES)
    world.run(100)
    world.num_asked.clear()
    world.run(4000)
    asked = np.array(world.num_asked)
    some = asked[(asked > 0) & (asked < 64)]
    assert (some <= 16).mean() > 0.95, "eight rows, in pairs of rounds"
    assert np.count_nonzero(asked == 64) < np.count_nonzero(some) / 3
    assert len(some) > 20


def test_a_load_that_was_never_met_is_judged_by_what_is_known_of_others() -> None:
    """It does not pay at 16; with 64 come no rounds in which everybody is drafted for."""
    world = make(steady(0.5), 16, **SHARED_CORES)
    world.run(100)
    world.num_asked.clear()
    world.resize(64)
    world.run(12)
    assert max(world.num_asked) <= 16
    assert np.mean(world.num_asked[:5]) > 0, "some are asked in any case"


def test_a_crowd_that_comes_at_once_is_judged_as_the_crowd_that_it_will_be() -> None:
    world = make(steady(0.75), 1, **SHARED_CORES)
    world.run(120)
    crowd = [world._request(rid=1000 + n) for n in range(64)]
    load = StepLoad(num_rows=65, num_tokens=65)
    others = Decoding(load=load, times=world.profile, room=500, others=world.requests)
    assert sum(world.gate.ask_first(crowd, others)) < 8
    (newcomer,) = world.gate.ask_first(
        [world._request(rid=2000)],
        Decoding(load=StepLoad(num_rows=1, num_tokens=1), times=world.profile, room=500),
    )
    assert newcomer
