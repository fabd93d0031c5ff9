"""Runs on the virtual clock: closed forms, conservation, determinism, faults, changing pools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.simulation.autoscaling import Observation, Sizes
from deploy.simulation.scenario import Run, load_scenario
from deploy.simulation.sweep import report_of, simulate
from deploy.simulation.world import World
from tests.deploy.simulation.scenarios import EXACT, exact, merged, played


def rate_of(**change: object) -> float:
    return played(exact(**change)).figures()["tokens_per_s"]  # type: ignore[no-any-return]


# --- closed forms -----------------------------------------------------------------------------


def test_one_request_without_drafters_gets_a_token_every_step() -> None:
    assert rate_of(drafter={"num_replicas": 0}) == pytest.approx(1 / 0.021, rel=0.01)


def test_without_drafts_nobody_drafts() -> None:
    figures = played(exact(router={"scheduling": {"policy": "none"}}, trace={"users": 4})).figures()
    assert figures["tokens_per_s"] == pytest.approx(4 / 0.024, rel=0.01)
    assert figures["drafter_busy"] == 0


@pytest.mark.parametrize("users", [1, 6])
def test_right_drafts_give_a_whole_block_and_a_bonus_every_cycle(users: int) -> None:
    scheduling = {"policy": "full", "gather": "wait_for_all", "late_dispatch": False}
    cycle_s = (0.02 + 0.001 * 5 * users) + (0.005 + 0.001 * users) + 3 * 0.001
    tally = played(
        exact(
            router={"scheduling": scheduling},
            links={"latency_s": 0.001},
            trace={"users": users},
        )
    )
    figures = tally.figures()
    assert figures["accepted_length"] == pytest.approx(5.0)
    assert figures["budget"] == pytest.approx(5.0)
    assert figures["tokens_per_s"] == pytest.approx(5 * users / cycle_s, rel=0.01)
    assert figures["verifier_busy"] == pytest.approx((0.02 + 0.001 * 5 * users) / cycle_s, rel=0.01)


def test_drafts_that_are_always_wrong_cost_what_they_cost() -> None:
    scheduling = {"policy": "full", "gather": "wait_for_all", "late_dispatch": False}
    wrong = {"domains": [{"acceptance": [1e-5] * 4}]}
    rate = rate_of(router={"scheduling": scheduling}, acceptance=wrong)
    assert rate == pytest.approx(1 / (0.02 + 5 * 0.001 + 0.006), rel=0.01)


def test_a_shared_device_slows_drafting_and_verifying_alike() -> None:
    change = {
        "router": {"scheduling": {"policy": "full", "gather": "when_free"}},
        "drafter": {"curve": {"fixed_s": 0.03}},
        "trace": {"users": 8},
    }
    apart = rate_of(**change)
    together = rate_of(**merged(change, {"drafter": {"shares_verifier": True}}))
    assert together < 0.8 * apart


def test_the_first_token_waits_for_its_prompt() -> None:
    scenario = exact(
        router={"prefill_budget": 64},
        drafter={"num_replicas": 0},
        trace={
            "prompt": {"kind": "fixed", "mean": 160},
            "output": {"kind": "fixed", "mean": 10},
        },
    )
    # Chunks of 64, 64 and 32 tokens.
    expected = 3 * 0.02 + 160 * 0.001
    assert played(scenario).figures()["ttft_s"]["p50"] == pytest.approx(expected, rel=0.01)


# --- nothing is lost --------------------------------------------------------------------------

BUSY = {
    "duration_s": 12.0,
    "warmup_s": 0.0,
    "verifier": {"num_replicas": 2, "curve": "mixed", "max_requests": 8},
    "drafter": {"num_replicas": 2},
    "acceptance": {"domains": "paper_dspark_5"},
}

FAULTS = [
    {"kind": "drafter_down", "at_s": 1.0, "for_s": 1.0},
    {"kind": "verifier_down", "at_s": 1.5, "for_s": 1.0, "index": 1},
    {"kind": "lost_blocks", "at_s": 2.0, "for_s": 1.0, "share": 0.5},
    {"kind": "slow_drafter", "at_s": 2.5, "for_s": 1.0, "index": 1, "factor": 50.0},
    {"kind": "drafter_down", "at_s": 3.0, "for_s": 1.0, "index": 1},
    {"kind": "verifier_down", "at_s": 3.5, "for_s": 0.5},
    {"kind": "slow_verifier", "at_s": 4.0, "for_s": 1.0},
]


def test_every_request_of_a_trace_gets_all_its_tokens_whatever_fails(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lengths = [(10 + 7 * n % 90, 1 + 11 * n % 80) for n in range(80)]
    path.write_text(
        "\n".join(
            f'{{"timestamp": {40 * n}, "input_length": {a}, "output_length": {b}}}'
            for n, (a, b) in enumerate(lengths)
        )
    )
    trace = {"kind": "file", "path": str(path), "max_new_tokens": 100}
    tally = played(load_scenario(BUSY | {"trace": trace, "faults": FAULTS}))
    requests = tally.figures()["requests"]
    assert requests["arrived"] == requests["finished"] == 80
    assert requests["failed"] == requests["refused"] == 0
    assert requests["returned"] >= 4
    # That the texts are right, token by token, `Intake` asserts.
    assert tally.num_tokens == sum(b for _, b in lengths)
    assert tally.counters["num_rebinds"] > 0
    assert tally.counters["num_late_drafts"] > 0


@pytest.mark.parametrize("regime", ["greedy", "coupled", "rejection"])
@pytest.mark.parametrize("policy", ["adaptive", "causal", "full", "fixed:2", "threshold:0.5"])
def test_policies_and_regimes_serve_everyone(regime: str, policy: str) -> None:
    scenario = load_scenario(
        merged(
            BUSY,
            {
                "duration_s": 2.0,
                "router": {"scheduling": {"policy": policy}},
                "acceptance": {"regime": regime},
                "trace": {"kind": "poisson", "rate": 20.0, "output": {"mean": 30}},
            },
        )
    )
    world = World(scenario)
    figures = world.run().figures()
    requests = figures["requests"]
    waiting = world.intake.num_queued + world.intake.num_running
    assert requests["arrived"] == requests["finished"] + waiting
    assert requests["finished"] > 15
    assert figures["accepted_length"] > 1.5


@pytest.mark.parametrize("gate_drafts", [False, True])
def test_a_target_rate_is_sought_and_told(gate_drafts: bool) -> None:
    """Also where, but for the weights, nobody would be drafted for."""
    services = [{"share": 0.25, "tier": "interactive", "target_rate": 60.0}]
    tree = merged(
        BUSY,
        {
            "duration_s": 12.0,
            "router": {"scheduling": {"gate_drafts": gate_drafts}},
            "verifier": {
                "num_replicas": 1,
                "curve": {"fixed_s": 0.002, "per_token_s": 0.0006},
                "max_requests": 32,
            },
            "drafter": {"curve": {"fixed_s": 0.002}},
            "acceptance": {"domains": "embedded_coupled"},
            "trace": {"users": 20, "prompt": {"mean": 20}, "output": {"mean": 50}},
        },
    )

    def share(**trace: object) -> float:
        target = played(load_scenario(merged(tree, {"trace": trace}))).figures()["target"]
        assert target["requests"] > 10
        return float(target["share_of_it"]["p50"])

    plain = share(services=[{"share": 0.25, "target_rate": 1e-3}]) * 1e-3 / 60.0
    assert share(services=services) > plain


def test_a_full_queue_turns_requests_away() -> None:
    scenario = load_scenario(
        merged(
            BUSY,
            {
                "router": {"max_queued_requests": 4},
                "trace": {"kind": "poisson", "rate": 200.0},
                "duration_s": 3.0,
            },
        )
    )
    requests = played(scenario).figures()["requests"]
    assert requests["refused"] > 100
    assert requests["failed"] == 0


def test_what_fits_no_verifier_fails_and_harms_nobody() -> None:
    long = {"kind": "fixed", "mean": 5000, "most": 10_000}
    scenario = load_scenario(
        merged(BUSY, {"verifier": {"max_model_len": 4096}, "trace": {"prompt": long}})
    )
    requests = played(scenario).figures()["requests"]
    assert requests["failed"] == requests["arrived"] == 32


# --- chance -----------------------------------------------------------------------------------

CELLS = merged(
    BUSY,
    {
        "cells": 3,
        "duration_s": 1.0,
        "trace": {"users": 12, "output": {"mean": 20}},
        "faults": [{"kind": "drafter_down", "at_s": 0.3, "for_s": 0.3, "cells": [1]}],
    },
)


def report(num_processes: int, **change: object) -> dict[str, Any]:
    run = Run(variant="", point=None, scenario=load_scenario(merged(CELLS, change)))
    return report_of([run], simulate([run], num_processes=num_processes))


@pytest.fixture(scope="module")
def usual() -> dict[str, Any]:
    return report(1)


def test_the_seed_decides_everything(usual: dict[str, Any]) -> None:
    assert report(1) == usual
    assert report(1, seed=1)["rows"] != usual["rows"]


def test_the_number_of_processes_changes_nothing(usual: dict[str, Any]) -> None:
    assert report(2) == usual


def test_progress_adds_up() -> None:
    run = Run(variant="", point=None, scenario=load_scenario(merged(CELLS, {"duration_s": 0.2})))
    shares: list[float] = []
    simulate([run, run], progress=shares.append)
    assert sum(shares) == pytest.approx(1.0)


# --- the machine changes ----------------------------------------------------------------------


def errors_after_slow_down(*, live: bool) -> tuple[float, float]:
    """Mean |predicted / actual - 1| a few hundred steps after the machine has become two times
    slower, and a few hundred after it has recovered."""
    scenario = load_scenario(
        merged(
            BUSY,
            {
                "duration_s": 24.0,
                "verifier": {"num_replicas": 1},
                "router": {"scheduling": {"live_profile": live}},
                "trace": {"users": 2},
                "faults": [{"kind": "slow_verifier", "at_s": 6.0, "for_s": 9.0}],
            },
        )
    )
    line = World(scenario).run().timeline
    assert line.steps[50:125].sum() > 200
    assert line.steps[125:].sum() > 200

    def error(begin: int, end: int) -> float:
        return abs(line.predicted_s[begin:end].sum() / line.step_s[begin:end].sum() - 1)

    return error(115, 125), error(190, 200)


def test_the_live_profile_follows_a_noisy_neighbour_there_and_back() -> None:
    slow, recovered = errors_after_slow_down(live=True)
    assert slow < 0.05
    assert recovered < 0.05


def test_a_profile_that_does_not_live_is_wrong_by_the_whole_slow_down() -> None:
    slow, recovered = errors_after_slow_down(live=False)
    assert slow == pytest.approx(0.5, abs=0.1)
    assert recovered < 0.05


# --- pools change -----------------------------------------------------------------------------


class Script:
    """Sizes by time."""

    def __init__(self) -> None:
        self.seen: list[Observation] = []

    def decide(self, seen: Observation) -> Sizes:
        self.seen.append(seen)
        many = 6 <= seen.now < 14
        return Sizes(verifiers=3 if many else 1, drafters=2 if many else 1)


def test_an_autoscaler_changes_the_pools_and_nobody_notices() -> None:
    scenario = load_scenario(
        merged(
            BUSY | {"acceptance": {"domains": "paper_mtp1"}},
            {
                "duration_s": 20.0,
                "scale_period_s": 1.0,
                "verifier": {
                    "num_replicas": 1,
                    "start_s": 2.0,
                    "curve": "large",
                    "max_requests": 4,
                },
                "drafter": {"num_replicas": 1, "start_s": 2.0},
                "trace": {"users": 12, "output": {"mean": 30}},
            },
        )
    )
    script = Script()
    world = World(scenario, autoscaler=script)
    requests = world.run().figures()["requests"]
    by_time = {round(seen.now): seen for seen in script.seen}
    assert by_time[7].num_starting_verifiers == 2
    assert (by_time[7].num_verifiers, by_time[9].num_verifiers) == (1, 3)
    assert by_time[9].num_drafters == 2
    assert (by_time[16].num_verifiers, by_time[16].num_drafters) == (1, 1)
    assert len(world.pools.lanes) == 1
    assert len(world.pools.drafters) == 1
    assert by_time[12].tokens_per_s > 2 * by_time[5].tokens_per_s
    assert by_time[5].num_queued > 0
    assert 0.5 < by_time[5].verifier_busy <= 1
    assert requests["failed"] == requests["returned"] == 0


def test_more_verifiers_give_more() -> None:
    change = {"duration_s": 6.0, "trace": {"users": 8}, "verifier": {"max_requests": 4}}
    scenario = merged(EXACT, change)
    one, two = (
        played(load_scenario(merged(scenario, {"verifier": {"num_replicas": n}}))) for n in (1, 2)
    )
    assert two.num_tokens > 1.5 * one.num_tokens
