"""One served application for all tests that need a running one: SmolLM2 on a private Ray."""

from __future__ import annotations

import contextlib
import socket
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from cluster.config import Config, load_config
from cluster.model_store import ensure_drafter
from dspark import AsyncClient, Client

TOKEN = "a-token-for-tests"


@dataclass(frozen=True, kw_only=True)
class Served:
    """A running application."""

    address: str
    config: Config

    def client(self, token: str = TOKEN) -> Client:
        """A synchronous client."""
        return Client(self.address, token=token, application=self.config.cluster.application)

    def async_client(self, token: str = TOKEN) -> AsyncClient:
        """An asyncio client, for the running loop."""
        application = self.config.cluster.application
        return AsyncClient(self.address, token=token, application=application)

    def replica_pids(self, pool: str) -> list[int]:
        """Processes, started by this one, of a pool's replicas: ``Drafter``, ``Verifier``, ..."""
        title = f"ray::ServeReplica:{self.config.cluster.application}:{pool}"
        pids = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it is just ending
                if " ".join(process.cmdline()).startswith(title):
                    pids.append(process.pid)
        return pids


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.fixture(scope="session")
def served_drafter() -> Path:
    """The shipped drafter."""
    folder = ensure_drafter("default", "smollm2-135m")
    assert folder is not None
    return folder


@pytest.fixture(scope="session")
def served(smollm2_dir: Path, served_drafter: Path) -> Iterator[Served]:
    """Router, verifier and drafter on Ray Serve; about a minute to start, stopped at the end."""
    from deploy.service import serving

    config = load_config(
        {
            "model": {"target": str(smollm2_dir)},
            "drafter": {"checkpoint": str(served_drafter), "num_cpus": 0.2},
            "verifier": {"profile_budget_s": 5.0, "num_cpus": 0.5},
            "router": {
                "num_cpus": 0.2,  # room for a second application on two cores
                # Tests of drafts want some, whether they pay on this machine or not.
                "scheduling": {"gate_drafts": False},
            },
            "cluster": {"grpc_port": free_port(), "auth_token": TOKEN},
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, at start and stop
        with serving(
            config, ray_address="", phase=lambda name: None, report=lambda *progress: None
        ) as address:
            yield Served(address=address, config=config)
