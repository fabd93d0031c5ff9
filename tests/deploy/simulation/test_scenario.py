"""Scenario files: strict, with presets, sweeps and settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import ConfigError
from deploy.simulation.examples import SCENARIOS
from deploy.simulation.presets import CURVES, DOMAINS
from deploy.simulation.scenario import built_in, load_scenario, runs_of


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"verifer": {}}, "verifer: unknown key"),
        ({"verifier": {"curve": {"fixed": 1}}}, "verifier.curve.fixed: unknown key"),
        ({"verifier": {"curve": "moderate"}}, "no curve 'moderate'"),
        ({"acceptance": {"domains": "paper"}}, "no domains 'paper'"),
        ({"acceptance": {"domains": [{"acceptance": ["x"]}]}}, r"domains\[0\].acceptance\[0\]"),
        ({"faults": {}}, "faults: expected a list"),
        ({"faults": [{"kind": "flood"}]}, r"faults\[0\].kind"),
        ({"cells": 0}, "cells: 0 must be over 0"),
        ({"duration_s": 5, "warmup_s": 5}, "warmup_s"),
        ({"variants": []}, "variants"),
        ({"variants": [{"name": "a"}, {"name": "a"}]}, "variants"),
    ],
)
def test_mistakes_are_named(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_scenario(tree)


def test_names_stand_for_sections() -> None:
    scenario = load_scenario(
        {"verifier": {"curve": "large"}, "acceptance": {"domains": "embedded_greedy"}}
    )
    assert scenario.verifier.curve == CURVES["large"]
    assert scenario.acceptance.domains == DOMAINS["embedded_greedy"]()


def test_files_stand_for_sections(tmp_path: Path) -> None:
    row = {"drafter": "a", "temperature": 0.0, "mode": "greedy", "domain": "math", "position": 1}
    path = tmp_path / "eval.json"
    path.write_text(json.dumps({"positions": [row | {"acceptance": 0.5}]}))
    tree = {"acceptance": {"regime": "greedy", "domains": str(path)}}
    assert load_scenario(tree).acceptance.domains[0].acceptance == (0.5,)
    costs = {"row_s": 0.0, "context_s": 0.0, "pair_s": 0.0, "prefill_s": -1e-5}
    path.write_text(json.dumps({"tokens": [1, 8], "live_s": [0.1, 0.2], "live_costs": costs}))
    curve = load_scenario({"verifier": {"curve": str(path)}}).verifier.curve
    assert curve.table_s == (0.1, 0.2)
    assert curve.per_prefill_s == -1e-5


def test_settings_change_values_and_are_checked_like_the_file() -> None:
    settings = ["router.scheduling.policy=fixed:3", "verifier.max_requests=8"]
    scenario = load_scenario({"verifier": {"curve": "mixed"}}, settings)
    assert scenario.router.scheduling.policy == "fixed:3"
    assert scenario.verifier.max_requests == 8
    for setting, message in (
        ("router.scheduling.polcy=none", "router.scheduling.polcy: unknown key"),
        ("verifier.max_requests=many", "verifier.max_requests"),
        ("verifier", "no setting"),
        ("verifier.curve.fixed_s=1", "no section"),
        ("seed=[", "not YAML"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_scenario({"verifier": {"curve": "mixed"}}, [setting])


def test_a_sweep_runs_every_variant_at_every_point() -> None:
    tree = {
        "points": [2, 8],
        "variants": [
            {"name": "a"},
            {"name": "b", "set": ["router.scheduling.policy=none", "drafter.num_replicas=0"]},
        ],
    }
    runs = runs_of(tree)
    seen = [(r.point, r.variant, r.scenario.trace.users) for r in runs]
    assert seen == [(2, "a", 2), (2, "b", 2), (8, "a", 8), (8, "b", 8)]
    assert [r.scenario.drafter.num_replicas for r in runs] == [1, 0, 1, 0]
    (run,) = runs_of(tree | {"points": [0.5], "variants": [{"name": "a"}]}, ["trace.kind=poisson"])
    assert run.scenario.trace.rate == 0.5
    (run,) = runs_of({})
    assert run.point is None
    with pytest.raises(ConfigError, match=r"points: 0.5 users"):
        runs_of({"points": [0.5]})


def test_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("seed: 5\n")
    assert load_scenario(path).seed == 5
    path.write_text("- 5\n")
    with pytest.raises(ConfigError, match="holds no scenario"):
        load_scenario(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="not YAML"):
        load_scenario(path)
    with pytest.raises(ConfigError, match="cannot read"):
        load_scenario(tmp_path / "none.yaml")


@pytest.mark.parametrize("name", sorted(path.stem for path in SCENARIOS.glob("*.yaml")))
def test_scenarios_that_come_with_the_package_are_sound(name: str) -> None:
    for run in runs_of(built_in(name)):
        assert run.scenario.title


def test_there_are_four_of_them() -> None:
    names = {path.stem for path in SCENARIOS.glob("*.yaml")}
    assert names == {"laptop", "one_h100", "two_pools", "thousand"}
    with pytest.raises(ConfigError, match="no scenario 'desk'"):
        built_in("desk")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["faults=[{kind: verifier_down, index: 1}]"], r"faults\[0\].index: 1 of 1 replicas"),
        (["faults=[{kind: slow_drafter, cells: [4]}]"], r"faults\[0\].cells: 4 of 1 cells"),
        (["points=[1.7]"], "points: 1.7 users"),
    ],
)
def test_what_would_change_nothing_or_be_rounded_is_refused(
    settings: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        runs_of(built_in("laptop"), settings)


def test_what_is_no_yaml_is_said_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("a: [1\n")
    for source, settings in ((path, []), ({}, ["title=[1"])):
        with pytest.raises(ConfigError, match="is not YAML") as caught:
            load_scenario(source, settings)
        assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hello", "not JSON"),
        ("{}", "'live_s' is missing"),
        ("[]", "a value is of the wrong type"),
        ('{"verifiers": []}', "a list is too short"),
        ('{"verifiers": 5}', "a value is of the wrong type"),
    ],
)
def test_files_in_place_of_sections_are_refused_in_words(
    text: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "found.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_scenario({}, [f"verifier.curve={path}"])
    assert said in caught.value.message
    assert caught.value.hint == "write one with dspark profile --json"
    with pytest.raises(ConfigError) as caught:
        load_scenario({}, [f"acceptance.domains={path}"])
    assert "Error(" not in caught.value.message
    assert caught.value.hint == "write one with dspark eval --json"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("duration_s", "is no setting"),
        ("=5", "is no setting"),
        (".x=5", "is no setting"),
        ("verifier..x=5", "is no setting"),
        ("duration_s=2024-13-01", "month must be in"),
        ("trace.rate.mean=3", "rate is no section here"),
    ],
)
def test_settings_that_are_none(setting: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_scenario({"trace": {"rate": 1.0}}, [setting])
    assert said in caught.value.message


def test_a_small_load_level_is_read_back() -> None:
    tree = {"trace": {"kind": "poisson"}, "points": [0.00001]}
    (run,) = runs_of(tree)
    assert run.scenario.trace.rate == 0.00001
