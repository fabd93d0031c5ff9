"""`dspark simulate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark.cli import main

SCENARIO = """
title: "Two users"
duration_s: 3
warmup_s: 0.5
verifier: {curve: large, max_requests: 4}
drafter: {curve: {fixed_s: 0.004}}
acceptance: {domains: paper_dspark_5}
trace: {kind: closed, users: 2, prompt: {mean: 20}, output: {mean: 30}}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO)
    return path


def test_it_reports_and_draws(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, pictures = tmp_path / "out.json", tmp_path / "pictures"
    sweep = ["--policy", "full", "--policy", "none", "--points", "1", "2", "--set", "seed=3"]
    places = ["--json", str(out), "--pictures", str(pictures)]
    assert main(["simulate", "--scenario", str(scenario), *sweep, *places]) == 0
    shown = capsys.readouterr().out
    assert "Two users" in shown
    report = json.loads(out.read_text())
    assert report["seed"] == 3
    assert [(row["point"], row["variant"]) for row in report["rows"]] == [
        (1.0, "full"),
        (1.0, "none"),
        (2.0, "full"),
        (2.0, "none"),
    ]
    full, none = (row["figures"] for row in report["rows"][:2])
    assert full["tokens_per_s"] > 1.5 * none["tokens_per_s"]
    assert none["budget"] == 1.0
    assert full["budget"] > 4
    assert sum(report["rows"][0]["timeline"]["tokens"]) > full["tokens_per_s"] * 2.5
    names = {path.name for path in pictures.iterdir()}
    assert names == {
        f"{name}.png" for name in ("frontier", "budget", "utilisation", "latency", "timeline")
    }
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ["--scenario", "desk"],
        ["--scenario", "laptop", "--policy", "guess"],
        ["--scenario", "laptop", "--set", "router.cells=3"],
        ["--scenario", "laptop", "--processes", "0"],
        ["--scenario", "laptop", "--json", "/"],
    ],
)
def test_mistakes_cost_a_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *words]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_run_in_which_nothing_ends_is_drawn_all_the_same(scenario: Path, tmp_path: Path) -> None:
    short = ["--set", "duration_s=0.2", "--set", "warmup_s=0.1", "--set", "trace.output.mean=900"]
    words = ["simulate", "--scenario", str(scenario), *short, "--pictures", str(tmp_path / "p")]
    assert main(words) == 0
    assert (tmp_path / "p" / "latency.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_that_cannot_be_is_found_out_before_the_work(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--scenario", str(scenario), "--pictures", str(scenario)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "error: --pictures: cannot write to" in shown.err
    assert "hint: name a folder" in shown.err
