"""The prepared training script, whole, at a size that a CPU can do."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from drafter_service.loading import load_drafter
from drafter_service.training.dataset import load_records
from tests.text_targets import VOCAB, write_prompts, write_text_target

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
LIMIT_BYTES = 15_000_000


def _run(script: str, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPTS / script), *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_target(tmp_path_factory.mktemp("model") / "target")


@pytest.fixture
def parts(target: Path, tmp_path: Path) -> Path:
    # One part would not show the order: the archive needs a second megabyte.
    (target / "padding.bin").write_bytes(os.urandom(1_500_000))
    done = _run("split_model.sh", target, tmp_path / "parts", 1)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "parts").glob("model.part-*"))) == 2
    return tmp_path / "parts"


def _train(parts: Path, tmp_path: Path, *more: object, budget_s: int) -> Sequence[object]:
    return (
        *("--model-parts", parts, "--prompts", tmp_path / "prompts.jsonl"),
        *("--eval-prompts", tmp_path / "eval.jsonl", "--out", tmp_path / "out"),
        *("--work", tmp_path / "work", "--device", "cpu", "--budget-s", budget_s),
        *("--samples", 1, "--requests", 4, "--max-new-tokens", 12, *more, "--"),
        *("--layers", 1, "--gamma", 2, "--markov-rank", 4, "--steps", 6, "--held-out", 3),
        *("--sequences-per-step", 2, "--anchors", 3, "--evaluate-every", 3, "--max-length", 96),
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_script_does_everything(target: Path, parts: Path, tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl", 200)
    write_prompts(tmp_path / "eval.jsonl", 4)
    done = _run("gpu_train.sh", *_train(parts, tmp_path, budget_s=1500), "--temperatures", 0)
    logs = {path.name: path.read_text()[-500:] for path in (tmp_path / "out/logs").iterdir()}
    assert done.returncode == 0, (done.stdout, done.stderr, logs)
    for phase in ("responses", "train", "calibrate", "eval"):
        assert f"{phase}: status 0" in done.stdout, (done.stdout, logs)
    out = tmp_path / "out"
    assert {"curve.json", "curve.png", "eval.json"} <= {path.name for path in out.iterdir()}
    files = [path for path in out.rglob("*") if path.is_file()]
    assert all(path.stat().st_size <= LIMIT_BYTES for path in files)
    assert subprocess.run([out / "join.sh"], check=False).returncode == 0
    assert load_drafter(out / "drafter", target).spec.gamma == 2
    assert (out / "drafter" / "calibration.json").is_file()
    rows = json.loads((out / "eval.json").read_text())["rows"]
    assert {row["temperature"] for row in rows} == {0.0, 1.0}
    # Prompts kept for calibration are answered by nobody before.
    records = load_records(out / "train" / "responses.jsonl", vocab_size=VOCAB, max_length=96)
    calibration = (tmp_path / "work" / "calibration.jsonl").read_text().splitlines()
    assert len(calibration) == 10
    assert len({record.prompt for record in records}) == 200 - 10


def test_without_time_it_still_ends_and_says_that_there_is_no_drafter(
    parts: Path, tmp_path: Path
) -> None:
    write_prompts(tmp_path / "prompts.jsonl", 60)
    write_prompts(tmp_path / "eval.jsonl", 4)
    done = _run("gpu_train.sh", *_train(parts, tmp_path, budget_s=1))
    assert done.returncode == 1
    assert "error: no drafter" in done.stderr
    assert (tmp_path / "out" / "SHA256SUMS").is_file()


def test_damaged_parts_are_refused(parts: Path, tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl", 3)
    write_prompts(tmp_path / "eval.jsonl", 3)
    last = max(parts.glob("model.part-*"))
    last.write_bytes(last.read_bytes()[:-1])
    done = _run("gpu_train.sh", *_train(parts, tmp_path, budget_s=60))
    assert done.returncode == 2
    assert "damaged or incomplete" in done.stderr
    last.unlink()
    assert _run("gpu_train.sh", *_train(parts, tmp_path, budget_s=60)).returncode == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--model-parts DIR"),
        (("--model", "m"), "--model-parts DIR"),
        (("--nonsense", "1"), "--model-parts DIR"),
        (
            ("--model", "m", "--prompts", "none", "--eval-prompts", "none", "--out", "o"),
            "no prompts in none",
        ),
    ],
)
def test_wrong_arguments_are_told(words: Sequence[str], message: str) -> None:
    done = _run("gpu_train.sh", *words)
    assert done.returncode == 2
    assert message in done.stderr


def test_parts_join_to_what_was_split(target: Path, parts: Path, tmp_path: Path) -> None:
    whole = b"".join(path.read_bytes() for path in sorted(parts.glob("model.part-*")))
    joined = tmp_path / "joined"
    joined.mkdir()
    subprocess.run(["tar", "-C", joined, "-xf", "-"], input=whole, check=True)
    for path in target.iterdir():
        a, b = (hashlib.sha256(p.read_bytes()).digest() for p in (path, joined / path.name))
        assert a == b
    again = _run("split_model.sh", target, parts)
    assert again.returncode == 2
    assert "parts already" in again.stderr
