"""What the replicas of every pool share."""

from __future__ import annotations

import os
import threading

import pytest

from cluster.environment import use_threads
from deploy import replica


async def test_loading_leaves_no_thread_behind() -> None:
    """A thread that stays keeps an OpenMP team of its own, and slows the engine's."""
    before = set(threading.enumerate())
    seen: list[threading.Thread] = []

    def load(value: int) -> int:
        seen.append(threading.current_thread())
        return value + 1

    assert await replica.in_passing(load, 1) == 2
    assert seen[0] is not threading.main_thread()
    assert set(threading.enumerate()) <= before


async def test_what_loading_raises_comes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        await replica.in_passing(lambda: 1 / 0)


def test_a_short_spin_unless_somebody_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    use_threads(1)
    assert os.environ["GOMP_SPINCOUNT"] == "10000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    use_threads(1)
    assert os.environ["GOMP_SPINCOUNT"] == "7"
