"""`dspark eval` on a tiny pair, and every mistake found before the models are loaded."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from dspark.cli import main
from dspark.report_file import PICTURES, PICTURES_BY_DRAFTER
from tests.deploy.random_drafter import write_random_drafter
from tests.verifier_service.torch_targets import VOCAB_SIZE, save_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with a tokenizer of ``w0 w1 ...``, a drafter, and three prompts."""
    folder = tmp_path_factory.mktemp("eval")
    target = folder / "target"
    save_llama(target)
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(target / "tokenizer.json"))
    write_random_drafter(folder / "drafter", target)
    prompts = [
        {"prompt": "w1 w2 w3", "source": "one", "domain": "math"},
        {"prompt": "w4 w5 w6 w7", "source": "one", "domain": "math"},
        {"turns": ["w8 w9"], "source": "two", "domain": "chat"},
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    return folder


def evaluate(folder: Path, out: Path, *more: str, **changes: str) -> int:
    """Run the command in this process, small."""
    options = {
        "--prompts": str(folder / "prompts.jsonl"),
        "--target": str(folder / "target"),
        "--drafter": str(folder / "drafter"),
        "--json": str(out),
        "--max-new-tokens": "12",
        "--threads": "1",
        "--device": "cpu",
    }
    options |= {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    return main(["eval", *(word for pair in options.items() for word in pair), *more])


def read(out: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def test_it_reports_tables_json_and_pictures(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "report.json"
    assert evaluate(folder, out, "--drafter", "ngram", "--batch-sizes", "1", "2") == 0
    printed = capsys.readouterr()
    assert "Accepted length, greedy" in printed.out
    assert "ngram, T=1, rejection: accepted length" in printed.err
    report = read(out)
    assert report["num_prompts"] == 3
    assert report["lost_sessions"] == 0
    rows = report["rows"]
    assert {(r["temperature"], r["mode"]) for r in rows} == {
        (0.0, "greedy"),
        (1.0, "coupled"),
        (1.0, "rejection"),
    }
    assert {(r["source"], r["domain"]) for r in rows} == {("one", "math"), ("two", "chat")}
    assert {r["drafter"] for r in rows} == {str(folder / "drafter"), "ngram"}
    assert sum(r["tokens"] for r in rows) == 2 * 3 * 3 * 11  # the prefill gives each first token
    assert {f["draft_batch"] for f in report["batches"]} == {1, 2}
    pictures = {path.name for path in out.parent.glob("*.png")}
    for name in pictures:
        kind = name.removeprefix("report-").removesuffix(".png")
        assert kind in PICTURES or kind.startswith(PICTURES_BY_DRAFTER)
    assert {"report-lengths.png", "report-positions.png", "report-depths.png"} < pictures
    assert "report-lengths.png" in printed.out


def test_one_regime_on_few_prompts_repeats(folder: Path, tmp_path: Path) -> None:
    reports = []
    for name in ("a.json", "b.json"):
        out = tmp_path / name
        chosen = {"temperature": "0.8", "mode": "rejection", "limit_per_source": "1", "seed": "5"}
        assert evaluate(folder, out, **chosen) == 0
        reports.append(read(out))
    assert reports[0] == reports[1]
    assert reports[0]["num_prompts"] == 2
    assert {(r["temperature"], r["mode"]) for r in reports[0]["rows"]} == {(0.8, "rejection")}


def test_without_matplotlib_the_report_still_comes(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, package=None: None if name == "matplotlib" else find(name, package),
    )
    out = tmp_path / "report.json"
    assert evaluate(folder, out, temperature="0") == 0
    assert "dspark-serve[train]" in capsys.readouterr().out
    assert read(out)["rows"]
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"prompts": "gone.jsonl"}, "cannot read the prompt file gone.jsonl"),
        ({"drafter": "nonsense"}, "no drafter 'nonsense'"),
        ({"drafter": "none"}, "no drafter 'none'"),
        ({"target": "nonsense"}, "no model 'nonsense'"),
        ({"temperature": "-1"}, "temperature -1.0 is out of range"),
        ({"temperature": "1e9"}, "temperature 1000000000.0 is out of range"),
        ({"max_new_tokens": "0"}, "max_new_tokens: 0"),
        ({"limit_per_source": "0"}, "--limit-per-source: 0"),
        ({"threads": "-2"}, "--threads: -2"),
        ({"threads": "100000000"}, "--threads: 100000000"),
        ({"max_new_tokens": "1"}, "no round to measure"),
        ({"seed": "-1"}, "seed -1 is out of range"),
        ({"batch_sizes": "64"}, "over the concurrency"),
        ({"device": "abacus"}, "'abacus' is not a torch device"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_mistakes_are_one_line(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str],
    what: str,
) -> None:
    out = tmp_path / "report.json"
    assert evaluate(folder, out, **changes) == 2
    error = capsys.readouterr().err
    assert "error: " in error
    assert what in error
    assert "Traceback" not in error
    assert not out.exists()


def test_an_unwritable_report_is_found_before_the_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path, tmp_path / "file" / "report.json"):
        # A target that does not exist would be the next complaint.
        assert evaluate(folder, out, target="nonsense") == 2
        assert "error: --json: " in capsys.readouterr().err


def test_only_a_report_is_written_over(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("prompts.jsonl", "drafter/config.json"):
        before = (folder / name).read_bytes()
        assert evaluate(folder, folder / name, temperature="0") == 2
        assert "is no report" in capsys.readouterr().err
        assert (folder / name).read_bytes() == before
    out = tmp_path / "report.json"
    for num in (1, 2):
        assert evaluate(folder, out, temperature="0", limit_per_source=str(num)) == 0
    assert read(out)["num_prompts"] == 3
    assert evaluate(folder, tmp_path / ("x" * 300)) == 2
    assert "File name too long" in capsys.readouterr().err


def test_pictures_of_the_report_before_are_not_left_beside_the_new_one(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "report.json"
    old = ("report-batches.png", "report-thresholds-gone.png", "report-reliability-gone.png")
    foreign = ("report-mine.png", "other-batches.png", "report-batches.txt", "report-2-depths.png")
    for name in (*old, *foreign):
        (tmp_path / name).write_bytes(b"old")
    assert evaluate(folder, out, temperature="0") == 0
    assert not [name for name in old if (tmp_path / name).exists()]
    assert all((tmp_path / name).read_bytes() == b"old" for name in foreign)
    assert (tmp_path / "report-lengths.png").exists()


def test_a_failed_run_leaves_no_progress_above_its_error(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(folder, tmp_path / "report.json", device="abacus") == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] in (["error"], ["error", "hint"])


def test_names_are_shown_as_they_are(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither markup of the terminal nor formulas of the pictures."""
    drafter = tmp_path / "[/b] $_{$"
    shutil.copytree(folder / "drafter", drafter)
    prompts = tmp_path / "odd.jsonl"
    odd = {"prompt": "w1 w2", "source": "[/red]", "domain": "[red]数据 $x_{$"}
    prompts.write_text(json.dumps(odd))
    out = tmp_path / "report.json"
    changes = {"drafter": str(drafter), "prompts": str(prompts), "temperature": "0"}
    assert evaluate(folder, out, "--drafter", "ngram", **changes) == 0
    printed = capsys.readouterr().out
    for words in ("[/red]", "[red]数据 $x_{$", "[/b] $_{$"):
        assert words in printed
    assert list(tmp_path.glob("report-lengths.png"))


def test_an_empty_prompt_file_is_an_error(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    assert evaluate(folder, tmp_path / "report.json", prompts=str(empty)) == 2
    assert "holds no prompts" in capsys.readouterr().err
