"""`dspark demo` as a user runs it: its own process, its own Ray, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster.environment import child_environment
from tests.deploy.conftest import free_port

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.model]

KEYS = {
    "tokens_per_s_user",
    "tokens_per_s_total",
    "accepted_length",
    "proposed",
    "verified",
    "accepted",
    "ttft_s",
}


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A temporary folder for the demo, with a path short enough for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        yield Path(folder)


def start_demo(scratch: Path, smollm2: Path, drafter: Path, *words: str) -> subprocess.Popen[str]:
    """The demo in a process group of its own, with home and temporary files under ``scratch``."""
    (scratch / "home").mkdir()
    (scratch / "tmp").mkdir()
    config = scratch / "config.yaml"
    config.write_text(
        f"model: {{target: {smollm2}}}\ndrafter: {{checkpoint: {drafter}}}\n"
        "verifier: {profile_budget_s: 5.0}\n"
    )
    command = [sys.executable, "-m", "dspark", "demo", "--config", str(config)]
    command += ["--port", str(free_port()), "--max-tokens", "16", *words]
    environment = child_environment(HOME=str(scratch / "home"), TMPDIR=str(scratch / "tmp"))
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def left_behind(scratch: Path) -> tuple[list[str], list[Path]]:
    """Processes that name the folder, and files in it that the demo was not asked to write."""
    mine = [
        " ".join(process.info["cmdline"])
        for process in psutil.process_iter(["cmdline"])
        if str(scratch) in " ".join(process.info["cmdline"] or ())
    ]
    return mine, [*(scratch / "tmp").iterdir(), *(scratch / "home").iterdir()]


def test_the_demo_ends_with_figures_and_leaves_nothing(
    scratch: Path, smollm2_dir: Path, served_drafter: Path
) -> None:
    path = scratch / "figures.json"
    process = start_demo(
        scratch, smollm2_dir, served_drafter, "--json", str(path), "--concurrency", "6"
    )
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    assert "greedy texts with and without drafts: identical, all 12" in output
    for row in ("accepted length", "tokens per verify step", "tokens/s in all", "tokens accepted"):
        assert row in output
    figures = json.loads(path.read_text())
    assert set(figures) == {"drafted", "plain", "greedy_identical"}
    assert figures["greedy_identical"] is True
    assert set(figures["drafted"]) == set(figures["plain"]) == KEYS
    assert figures["drafted"]["proposed"] > 0
    assert figures["plain"]["proposed"] == 0
    assert figures["plain"]["accepted_length"] == 1.0
    assert left_behind(scratch) == ([], [])


@pytest.mark.parametrize("moment", ["starting Ray", "with drafts"])
def test_ctrl_c_leaves_nothing(
    scratch: Path, smollm2_dir: Path, served_drafter: Path, moment: str
) -> None:
    process = start_demo(scratch, smollm2_dir, served_drafter)
    assert process.stdout is not None
    if moment == "starting Ray":
        time.sleep(8)
    else:
        for line in process.stdout:
            if moment in line:
                break
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole foreground group
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert left_behind(scratch) == ([], [])
