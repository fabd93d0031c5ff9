"""What `dspark serve` leaves behind: nothing, whichever way it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from cluster.environment import child_environment
from deploy.service import require_free
from tests.deploy.conftest import free_port

pytestmark = [pytest.mark.ray, pytest.mark.model]

_START_S = 180.0
_END_S = 40.0


class Server:
    """``dspark serve`` in a process of its own, without a drafter."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.port = free_port()
        config = {
            "model": {"target": str(target)},
            "drafter": {"checkpoint": "none"},
            "verifier": {"profile_budget_s": 2.0, "num_cpus": 0.5},
            "router": {"num_cpus": 0.2},
            "cluster": {"grpc_port": self.port, "proxy": "haproxy"},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dspark", "serve", "--config", str(folder / "config.yaml")],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environment(DSPARK_TOKEN="a-token-of-this-test"),
                # Tests may run in the background, where shells have Ctrl-C ignored.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        self._wait()
        self.processes = psutil.Process(self.process.pid).children(recursive=True)
        self._folder = next(
            part.split("--log_dir=")[1].split("/session")[0]
            for process in self.processes
            for part in process.cmdline()
            if part.startswith("--log_dir=")
        )

    def proxies(self) -> list[str]:
        """Command lines of HAProxies of its private Ray, whoever is their parent."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if self._folder in line and "haproxy.cfg" in line:
                    found.append(line)
        return found

    def _wait(self) -> None:
        until_s = time.monotonic() + _START_S
        while "serving" not in self.log.read_text(errors="replace"):
            assert self.process.poll() is None, self.log.read_text(errors="replace")
            assert time.monotonic() < until_s, self.log.read_text(errors="replace")
            time.sleep(0.2)

    def left(self) -> list[str]:
        """Command lines of those of its processes that still live after a while."""
        _, alive = psutil.wait_procs(self.processes, timeout=_END_S)
        return [" ".join(process.cmdline())[:80] for process in alive]


@pytest.fixture
def server(tmp_path: Path, smollm2_dir: Path) -> Iterator[Server]:
    server = Server(tmp_path, smollm2_dir)
    yield server
    for process in [*server.processes, server.process]:
        with suppress(psutil.Error, OSError):
            process.kill()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left(server: Server, how: signal.Signals) -> None:
    """No process and no listener; above all not HAProxy, which Serve starts anew while it ends."""
    assert server.proxies()
    began_s = time.monotonic()
    server.process.send_signal(how)
    assert server.process.wait(_END_S) == 130
    assert time.monotonic() - began_s < _END_S / 2, "a server that nobody uses takes so long to end"
    assert server.left() == []
    assert server.proxies() == []
    require_free(server.port)


def test_a_killed_server_leaves_the_port(server: Server) -> None:
    """What Ray leaves for a while does not listen there."""
    assert server.proxies()
    server.process.send_signal(signal.SIGKILL)
    server.process.wait(_END_S)
    until_s = time.monotonic() + _END_S
    while server.proxies():
        assert time.monotonic() < until_s, server.proxies()
        time.sleep(0.2)
    require_free(server.port)
