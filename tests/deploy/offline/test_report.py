"""The report: complete, plain JSON, and shown in full by tables and pictures."""

from __future__ import annotations

import io
import json
import struct

import pytest
from rich.console import Console

from deploy.offline.evaluation import Measured, Plan
from deploy.offline.pictures import draw_report
from deploy.offline.report import Report, make_report
from deploy.offline.tables import report_tables
from tests.deploy.offline.made_rounds import make_measured

PLAN = Plan(drafters=("ours", "runs/theirs"), batch_sizes=(1, 4))


@pytest.fixture(scope="module")
def measured() -> list[Measured]:
    """Two drafters, greedy and sampled, the second one worse; and two batch sizes of the first."""
    found = [
        make_measured(drafter, temperature, bias=bias, seed=seed, num_lost=seed)
        for drafter, bias, seed in (("ours", 0.0, 0), ("runs/theirs", 0.3, 1))
        for temperature in (0.0, 1.0)
    ]
    return [*found, *(make_measured(draft_batch=size) for size in (1, 4))]


@pytest.fixture(scope="module")
def report(measured: list[Measured]) -> Report:
    return make_report(PLAN, measured, {"target": "tiny", "num_prompts": 40})


def test_it_is_json_with_the_promised_rows(report: Report) -> None:
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["target"] == "tiny"
    assert report["lost_sessions"] == 2
    assert len(report["rows"]) == 2 * 2 * 2
    for row in report["rows"]:
        assert row.keys() >= {
            "source", "domain", "drafter", "temperature", "mode", "accepted_length", "rounds",
            "tokens", "low", "high", "prompts",
        }  # fmt: skip
        assert row["accepted_length"] == pytest.approx(row["tokens"] / row["rounds"])
        assert row["low"] <= row["accepted_length"] <= row["high"]
    assert {(r["temperature"], r["mode"]) for r in report["rows"]} == {
        (0.0, "greedy"),
        (1.0, "coupled"),
    }


def test_domains_add_up_to_all(report: Report) -> None:
    mine = {
        f["domain"]: f
        for f in report["domains"]
        if (f["drafter"], f["temperature"]) == ("ours", 1.0)
    }
    assert mine.keys() == {"math", "chat", "all"}
    for count in ("tokens", "rounds", "prompts"):
        assert mine["math"][count] + mine["chat"][count] == mine["all"][count]
    assert mine["chat"]["accepted_length"] < mine["math"]["accepted_length"]


def test_every_figure_names_its_run(report: Report) -> None:
    lists = [value for value in report.values() if isinstance(value, list)]
    assert len(lists) == 11
    for listed in lists:
        assert listed
        assert all({"drafter", "temperature", "mode"} <= figure.keys() for figure in listed)


def test_the_others_are_compared_with_the_first(report: Report) -> None:
    found = report["comparisons"]
    assert {(f["drafter"], f["over"]) for f in found} == {("runs/theirs", "ours")}
    assert len(found) == 2 * 3
    assert all(f["low"] < f["quotient"] < f["high"] < 1 for f in found)


def test_batches_are_kept_apart_from_the_regimes(report: Report) -> None:
    assert [(f["drafter"], f["draft_batch"]) for f in report["batches"]] == [
        ("ours", 1),
        ("ours", 4),
    ]


def test_confidence_is_judged_at_every_position(report: Report) -> None:
    for name in ("ece", "brier"):
        assert len(report[name]) == 2 * 2 * 4
    assert len(report["auc"]) == 2 * 2 * 5
    ours = [f for f in report["ece"] if f["drafter"] == "ours"]
    theirs = [f for f in report["ece"] if f["drafter"] == "runs/theirs"]
    assert max(f["survival"] for f in ours) < 0.1 < theirs[0]["survival"]


def test_the_tables_show_every_drafter_in_every_regime(report: Report) -> None:
    console = Console(file=io.StringIO(), width=160, record=True)
    titles = []
    for table in report_tables(report):
        console.print(table)
        titles.append(str(table.title))
    text = console.export_text()
    assert [t.split(",")[0].split(":")[0] for t in titles] == [
        "Accepted length",
        "Accepted length",
        "Accepted length over that of ours (95% interval)",
        "Share accepted of the drafts reached",
        "Confidence (survival)",
        "Only drafts of this survival verified",
        "Accepted length by context depth",
        "Accepted length by most blocks drafted at once (95% interval)",
    ]
    row = next(r for r in report["rows"] if r["source"] == "chat-set")
    assert f"{row['accepted_length']:.2f} [{row['low']:.2f}, {row['high']:.2f}]" in text
    assert text.count("runs/theirs") == len(titles) - 1, "in all but the one of batches"
    assert text.count("T=1, coupled") == 1 + 1 + 4 * 2, "a row per drafter that was sampled"


def test_pictures_are_png_and_complete(report: Report) -> None:
    pictures = draw_report(report)
    assert set(pictures) == {
        "lengths", "positions", "depths", "batches", "thresholds-ours", "thresholds-theirs",
        "reliability-ours", "reliability-theirs",
    }  # fmt: skip
    for data in pictures.values():
        assert data.startswith(b"\x89PNG\r\n")
        width, height = struct.unpack(">II", data[16:24])
        assert width > 500
        assert height > 300


def test_figures_of_one_prompt_are_shown_without_intervals(measured: list[Measured]) -> None:
    table = measured[0].table
    single = [make_measured(drafter, table=table.of(table.prompt == 0)) for drafter in ("a", "b")]
    report = make_report(Plan(drafters=("a", "b")), single, {})
    console = Console(file=io.StringIO(), width=160, record=True)
    console.print(*report_tables(report))
    row = report["rows"][0]
    assert row["low"] is row["high"] is None
    text = console.export_text()
    assert f"{row['accepted_length']:.2f}  " in text
    assert "1.00" in text
    assert " [" not in text
    assert set(draw_report(report)) > {"lengths", "positions", "depths"}


def test_a_run_without_rounds_has_no_figures(measured: list[Measured]) -> None:
    """Every answer may end with its first token."""
    empty = make_measured(table=measured[0].table.of(measured[0].table.prompt < 0))
    report = make_report(Plan(drafters=("ours",)), [empty], {})
    assert report["rows"] == report["ece"] == report["batches"] == []
    assert list(report_tables(report)) == []
    assert draw_report(report) == {}
    assert "nothing" in empty.summary
