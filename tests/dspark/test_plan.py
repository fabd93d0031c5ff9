"""`dspark plan`: what the command prints, writes and returns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from dspark.cli import main

PLAN = {
    "title": "tiny",
    "traffic": {"requests_per_s": 4, "prompt": {"mean": 100}, "output": {"mean": 100}},
    "slo": {"tokens_per_s": 50},
    "limits": {"max_requests": 8, "max_verifiers": 4, "max_drafters": 2},
    "devices": [{"name": "big", "datasheet": "h100-sxm", "dollars_per_hour": 3.0, "drafts": False}],
}


def written(tmp_path: Path, **sections: object) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(PLAN | sections))
    return path


def test_prints_the_answer_and_writes_report_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, picture = tmp_path / "out.json", tmp_path / "out.png"
    plan = written(tmp_path)
    assert main(["plan", str(plan), "--json", str(report), "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "best: " in out
    assert "$/M tokens" in out
    rows = json.loads(report.read_text())["rows"]
    assert {row["way"] for row in rows} == {"colocated", "no drafts"}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_an_infeasible_plan_says_which_bound_fails_and_returns_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(written(tmp_path, slo={"tokens_per_s": 5000}))]) == 1
    out = capsys.readouterr().out
    assert "infeasible" in out
    assert "tokens_per_s: even alone" in out


@pytest.mark.parametrize(
    ("name", "said"), [("nowhere.yaml", "cannot read"), ("no_such_example", "chat_8b")]
)
def test_a_missing_file_is_one_line_and_a_hint(
    name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", name]) == 2
    assert said in capsys.readouterr().err


def test_a_wrong_key_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(written(tmp_path, slo={"speed": 3}))]) == 2
    assert "slo.speed" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["folder", "text"])
def test_a_picture_that_cannot_be_written_is_told_before_the_search(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deploy.simulation import plan_answer

    def answer(*_: object, **__: object) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr(plan_answer, "answer", answer)
    picture = tmp_path / "out.png"
    if kind == "folder":
        picture.mkdir()
    else:
        picture.write_text("something of mine")
    assert main(["plan", str(written(tmp_path)), "--picture", str(picture)]) == 2
    assert f"--picture: {picture}" in capsys.readouterr().err
    assert kind == "folder" or picture.read_text() == "something of mine"


def test_a_check_confirms_what_is_recommended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "out.json"
    assert main(["plan", str(written(tmp_path)), "--check", "5", "--json", str(report)]) == 0
    out = capsys.readouterr().out
    assert "confirmed by events: kept for " in out
    assert "kept, events" in out
    checks = json.loads(report.read_text())["checks"]
    assert any(check["confirmed"] for check in checks)
