"""Runs over several processes."""

from __future__ import annotations

import multiprocessing
import time

import pytest

from deploy.simulation.scenario import built_in, runs_of
from deploy.simulation.sweep import simulate


def test_an_interrupt_ends_the_cells_that_are_at_work() -> None:
    times = ["warmup_s=0", "points=[1]"]
    (short,) = runs_of(built_in("laptop"), [*times, "duration_s=1", "variants=[{name: a}]"])
    (long,) = runs_of(built_in("laptop"), [*times, "duration_s=500000", "variants=[{name: b}]"])

    def interrupt(share: float) -> None:
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        simulate([short, long], num_processes=2, progress=interrupt)
    while multiprocessing.active_children() and time.monotonic() - began < 30:
        time.sleep(0.05)
    assert not multiprocessing.active_children()
