"""`dspark train --prompts`: what is refused before anything is written, and what is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark.cli import main
from tests.text_targets import write_prompts, write_text_target


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target and nine prompts, one of them long."""
    folder = tmp_path_factory.mktemp("train")
    write_text_target(folder / "target")
    prompts = write_prompts(folder / "prompts.jsonl", 8)
    with prompts.open("a") as file:
        file.write(json.dumps({"prompt": "x" * 200, "source": "long"}) + "\n")
    return folder


def train(given: Path, work: Path, *words: str) -> int:
    """Responses alone, in this process, small; later words win."""
    paths = ("--target", given / "target", "--prompts", given / "prompts.jsonl")
    more = ("--work", work, "--output", work / "out", "--responses-only", "--no-keep-features")
    small = ("--max-new-tokens", "4", "--max-length", "60", "--temperatures", "0", "1")
    return main(["train", *map(str, (*paths, *more, *small)), "--requests", "4", *words])


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("temperatures", "1e-9", "temperatures [1e-09]"),
        ("temperatures", "nan", "temperatures [nan]"),
        ("temperatures", "inf", "temperatures [inf]"),
        ("temperatures", "-1", "temperatures [-1.0]"),
        ("temperatures", "11", "temperatures [11.0]"),
        ("samples", "0", "--samples: 0"),
        ("max-new-tokens", "0", "--max-new-tokens: 0"),
        ("requests", "0", "--requests: 0"),
        ("kv-tokens", "0", "--kv-tokens: 0"),
        ("kv-tokens", "15", "--kv-tokens: 15"),
        ("threads", "-3", "--threads: -3"),
        ("threads", "100000", "--threads: 100000"),
        ("generate-budget-s", "-1", "--generate-budget-s: -1.0"),
        ("generate-budget-s", "nan", "--generate-budget-s: nan"),
        ("seed", "-1", "seed = -1"),
        ("max-length", "0", "max_length = 0"),
        ("taps", "99", "target_layer_ids = [99]"),
        ("learning-rate", "nan", "learning_rate = nan"),
        ("learning-rate", "inf", "learning_rate = inf"),
        ("ce-weight", "nan", "cross_entropy = nan"),
        ("distillation-weight", "-1", "distillation = -1.0"),
    ],
)
def test_a_number_out_of_range_is_named_and_writes_nothing(
    given: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flag: str,
    value: str,
    said: str,
) -> None:
    assert train(given, tmp_path / "w", f"--{flag}={value}", "--keep-features") == 2
    error = capsys.readouterr().err
    assert error.count("error: ") == 1
    assert said in error
    assert not (tmp_path / "w").exists()


def test_it_says_how_many_responses_there_are_and_how_many_prompts_were_left_out(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "w"
    for _ in range(2):  # also when there is nothing left to do
        assert train(given, work) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert f"16 of 16 responses are in {work / 'responses.jsonl'}; 1 of 9 prompts" in out
        assert "too long for --max-length 60" in out
    assert train(given, tmp_path / "none", "--generate-budget-s", "0") == 0
    assert "0 of 16 responses" in capsys.readouterr().out


def test_a_refused_run_does_not_bind_the_corrected_one(given: Path, tmp_path: Path) -> None:
    """Found only when the engine opens, after the plan; then other settings, in the same folder."""
    work = tmp_path / "w"
    assert train(given, work, "--device", "abacus", "--seed", "5") == 2
    assert train(given, work, "--seed", "6") == 0
    assert json.loads((work / "responses.json").read_text())["seed"] == 6


def test_an_output_in_use_is_named_before_anything_is_generated(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "precious"
    output.mkdir()
    (output / "notes.txt").write_text("mine")
    paths = ("--target", given / "target", "--prompts", given / "prompts.jsonl")
    words = (*paths, "--work", tmp_path / "w", "--output", output, "--max-new-tokens", 4)
    assert main(["train", *map(str, words)]) == 2
    assert "not a drafter" in capsys.readouterr().err
    assert not (tmp_path / "w").exists()
