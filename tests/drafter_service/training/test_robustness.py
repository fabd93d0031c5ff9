"""Training in processes of its own: killed, out of disk, several at once."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from drafter_service.loading import load_drafter
from dspark.cli import main
from tests.text_targets import write_prompts, write_text_target

pytestmark = pytest.mark.timeout(900)  # a process spends its time on importing torch

SCHEDULE = (
    *("--steps", "40", "--sequences-per-step", "3", "--anchors", "5", "--evaluate-every", "20"),
    *("--checkpoint-every", "2", "--held-out", "3", "--gamma", "2", "--markov-rank", "4"),
    *("--max-length", "60"),
)
GENERATION = ("--max-new-tokens", "10", "--temperatures", "0", "1", "--requests", "4")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``target/``, ``prompts.jsonl`` and an unbroken run's ``whole/curve.json``."""
    folder = tmp_path_factory.mktemp("given")
    write_text_target(folder / "target")
    write_prompts(folder / "prompts.jsonl", 16)
    done = subprocess.run(_command(folder, folder / "whole"), env=_environment(), check=False)
    assert done.returncode == 0
    return folder


def _command(given: Path, work: Path, *more: str) -> list[str]:
    paths = ("--target", given / "target", "--prompts", given / "prompts.jsonl")
    words = ("train", *paths, "--work", work, "--output", work / "out", *SCHEDULE, *GENERATION)
    return [sys.executable, "-m", "dspark", *map(str, words), *more]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def _curve(work: Path) -> dict[str, Any]:
    curve: dict[str, Any] = json.loads((work / "curve.json").read_text())
    return curve


def _losses(work: Path) -> list[float]:
    return [step["loss"] for step in _curve(work)["steps"]]


def _kill_once(command: Sequence[str], path: Path) -> None:
    """Start, and send SIGKILL as soon as ``path`` is there."""
    process = subprocess.Popen(command, env=_environment(), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, "ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    "file", [pytest.param("responses.json", marks=pytest.mark.slow), "state.pt"]
)
def test_a_run_killed_outright_goes_on_to_the_same_curve(
    given: Path, tmp_path: Path, file: str
) -> None:
    command = _command(given, tmp_path / "w")
    _kill_once(command, tmp_path / "w" / file)
    assert subprocess.run(command, env=_environment(), check=False).returncode == 0
    found, expected = _losses(tmp_path / "w"), _losses(given / "whole")
    assert len(expected) == 40
    assert found == expected
    assert not list((tmp_path / "w").rglob("*.part"))


def test_two_ranks_give_the_curve_of_one(given: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = _command(given, tmp_path / "w")[1:]
    launcher = ("--nnodes=1", "--nproc-per-node=2", "--master-addr=127.0.0.1")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *launcher, f"--master-port={port}", *words],
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = _curve(given / "whole"), _curve(tmp_path / "w")
    assert len(two["steps"]) == 40
    for a, b in zip(one["steps"], two["steps"], strict=True):
        for name in ("loss", "cross_entropy", "total_variation", "confidence", "gradient_norm"):
            assert b[name] == pytest.approx(a[name], rel=1e-2)
    for a, b in zip(one["evaluations"], two["evaluations"], strict=True):
        assert b["expected_length"] == pytest.approx(a["expected_length"], rel=1e-2)
    assert done.stdout.count("drafter written") == 1  # only the first rank speaks
    load_drafter(tmp_path / "w" / "out", given / "target")


def test_a_file_system_without_room_stops_with_an_error_and_loses_nothing(
    given: Path, tmp_path: Path
) -> None:
    work = tmp_path / "w"
    command = _command(given, work)
    _kill_once(command, work / "state.pt")
    kept = {name: (work / name).read_bytes() for name in ("state.pt", "responses.jsonl")}

    def almost_full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    done = subprocess.run(
        command,
        env=_environment(),
        preexec_fn=almost_full,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "error: cannot write" in done.stderr
    assert "hint: free some space" in done.stderr
    assert "Traceback" not in done.stderr
    assert {name: (work / name).read_bytes() for name in kept} == kept
    if (work / "out" / "model.safetensors").exists():
        load_drafter(work / "out", given / "target")
    assert not [path for path in work.rglob("*") if ".part" in path.name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--prompts": "empty"}, "holds no prompt"),
        ({"--prompts": "none"}, "cannot read the prompt file"),
        ({"--target": "none"}, "no target model"),
        ({"--temperatures": "-1"}, "are out of range"),
    ],
)
def test_a_bad_start_is_one_line(
    given: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, str],
    message: str,
) -> None:
    (tmp_path / "empty").write_text("")
    [(name, value)] = change.items()
    value = value if name == "--temperatures" else str(tmp_path / value)
    assert main([*_command(given, tmp_path / "w")[3:], f"{name}={value}"]) == 2
    err = capsys.readouterr().err
    assert err.count("error: ") == 1
    assert message in err
