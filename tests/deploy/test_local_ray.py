"""Signals of a process that starts a Ray of its own."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import pytest
import ray

from cluster.errors import Unavailable
from deploy.local_ray import joined_ray


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
