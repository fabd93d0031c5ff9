"""The script that takes the scheduling apart: every part is really out, and its words follow."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from cluster.errors import ConfigError
from deploy.simulation.scenario import load_scenario

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("simulated_ablation")


def arguments(folder: Path, **changes: object) -> argparse.Namespace:
    values: dict[str, object] = {"folder": folder, "scenarios": None, "seeds": [0], "processes": 1}
    return argparse.Namespace(**(values | {"seconds": None} | changes))


def test_every_part_changes_every_scenario_and_nothing_else_does(script: ModuleType) -> None:
    assert len(script.SETUPS) >= 5
    for name in script.SETUPS:
        whole = load_scenario(*script.source(name, (), 3, None))
        assert whole.trace.kind in ("closed", "staggered"), "an open load serves what comes"
        assert (whole.seed, whole.points, len(whole.variants)) == (3, (), 1)
        for part in script.PARTS:
            less = load_scenario(*script.source(name, part.without, 3, None))
            assert less != whole, part.name
            assert (less.seed, less.trace, less.verifier) == (3, whole.trace, whole.verifier)


def test_rejection_mode_on_the_laptop_has_the_acceptance_that_was_measured_in_it(
    script: ModuleType,
) -> None:
    (part,) = (part for part in script.PARTS if part.name.startswith("coupled mode"))
    coupled, rejection = (
        load_scenario(*script.source("laptop, 4 users", less, 0, None)).acceptance
        for less in ((), part.without)
    )
    assert (coupled.regime, rejection.regime) == ("coupled", "rejection")
    assert rejection.domains[0].acceptance[0] > coupled.domains[0].acceptance[0]


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ([1.2, 1.001, 1.1], "helps"),
        ([0.9, 0.95, 0.999], "harms"),
        ([0.9, 1.2, 1.1], "unclear"),
        ([0.992, 1.009, 1.0], "nothing"),
    ],
)
def test_verdicts(script: ModuleType, ratios: list[float], said: str) -> None:
    assert script.verdict(ratios) == said


def test_a_short_run_writes_table_report_and_picture(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main(arguments(tmp_path, scenarios=["memory-bound"], seeds=[0, 1], seconds=1.0))
    report = json.loads((tmp_path / "simulated_ablation.json").read_text())
    assert list(report["scenarios"]) == ["memory-bound"]
    assert [row["part"] for row in report["rows"]] == [part.name for part in script.PARTS]
    for row in report["rows"]:
        rates = [[run["tokens_per_s"] for run in row[key]] for key in ("whole", "less")]
        assert row["ratios"] == [a / b for a, b in zip(*rates, strict=True)]
        assert row["whole"][0] != row["whole"][1], "seeds differ"
    text = (tmp_path / "simulated_ablation.txt").read_text()
    assert text == capsys.readouterr().out
    assert all(part.name in text for part in script.PARTS)
    assert (tmp_path / "simulated_ablation.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_scenario_is_refused(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no scenario 'mars'") as caught:
        script.main(arguments(tmp_path, scenarios=["mars"]))
    assert "long contexts" in caught.value.hint
