"""The comparing benchmarks against a scripted server: they run, go on where they were, refuse."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import REPO
from tests.dspark.fake_server import FakeDSpark


@pytest.fixture
def pareto(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPO / "benchmarks"))
    import comparing  # type: ignore[import-not-found]
    import pareto  # type: ignore[import-not-found]

    monkeypatch.setattr(comparing, "IN_BLOCKS", 1)
    monkeypatch.setattr(comparing, "ALONE", 1)
    module: ModuleType = pareto
    return module


def test_pareto_measures_what_its_report_lacks(
    fake: FakeDSpark,
    address: str,
    pareto: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "pareto.json"
    command = ["pareto.py", "--out", str(out), "--address", address, "--cycles", "2"]
    command += ["--users", "1", "2", "--settle", "0.01", "--measure", "0.05", "--per-user", "0"]
    monkeypatch.setattr("sys.argv", [*command, "--repeats", "2"])
    assert pareto.main() == 0
    printed = capsys.readouterr().out
    assert "adaptive / best fixed" in printed
    assert "none / plain" in printed
    report = json.loads(out.read_text())
    blocks = report["blocks"]
    few = [block for block in blocks if block["users"] == 1]
    many = [block for block in blocks if block["users"] == 2]
    assert len(few) == 2 * 2 * 6
    controls = [block["setting"] for block in many if block.get("control")]
    assert sorted(controls) == ["none", "none", "plain", "plain"]
    alone = [block["setting"] for block in many if block.get("alone")]
    assert sorted(alone) == ["adaptive", "adaptive", "none", "none"]
    assert len(many) == 2 * 2 * 5 + 4 + 4
    ratios = report["summary"]["adaptive_to"]
    assert {ratio["pairs"] for ratio in ratios if ratio["to"] != "none alone"} == {4}
    assert [ratio["users"] for ratio in ratios if ratio["to"] == "none alone"] == [2]
    assert [ratio["users"] for ratio in ratios if ratio["to"] == "plain"] == [1]
    for users in (1, 2):
        to = {ratio["to"]: ratio["ratio"] for ratio in ratios if ratio["users"] == users}
        assert to["best fixed"] == min(to["fixed:2"], to["fixed:4"])
    assert str(tmp_path) not in out.read_text(), "no path of this machine"
    (ratio,) = (r for r in report["summary"]["adaptive_to"] if (r["users"], r["to"]) == (1, "none"))
    assert ratio["required"] == 0.97
    assert ratio["holds"] == (ratio["lower"] >= 0.97)
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert fake.scheduling == {"policy": "adaptive", "gate_drafts": "true"}, "as it was found"

    fake.requests.clear()
    assert pareto.main() == 0
    assert not fake.requests, "everything is there already"
    monkeypatch.setattr("sys.argv", [*command, "--repeats", "3"])
    assert pareto.main() == 0
    longer = json.loads(out.read_text())["blocks"]
    assert longer[: len(blocks)] == blocks
    assert {block["unit"] for block in longer[len(blocks) :]} == {2}

    hurried = tmp_path / "hurried.json"
    monkeypatch.setattr("sys.argv", [*command, "--out", str(hurried), "--minutes", "0"])
    assert pareto.main() == 0
    assert "go on with the same command" in capsys.readouterr().out
    assert len(json.loads(hurried.read_text())["blocks"]) in (len(few) / 2, len(many) / 2)

    monkeypatch.setattr("sys.argv", [*command, "--seed", "5"])
    assert pareto.main() == 2
    assert "of another plan" in capsys.readouterr().err
