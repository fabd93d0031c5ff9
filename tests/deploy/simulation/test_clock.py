"""Events, links and devices."""

from __future__ import annotations

import numpy as np
import pytest

from deploy.simulation.clock import Clock, Device, Link


def test_events_come_in_order_of_time_then_of_planning() -> None:
    clock, seen = Clock(), []
    clock.at(2.0, seen.append, "c")
    clock.at(1.0, seen.append, "a")
    clock.at(1.0, seen.append, "b")
    clock.at(3.0, seen.append, "d")
    clock.run(2.5)
    assert seen == ["a", "b", "c"]
    assert clock.now == 2.5
    clock.at(1.0, lambda: seen.append(clock.now))
    clock.run(2.5)
    assert seen[-1] == 2.5


def test_a_link_keeps_the_order_of_frames() -> None:
    clock, seen = Clock(), []
    link = Link(clock, np.random.default_rng(0), latency_s=0.1, jitter_s=1.0)
    for n in range(50):
        link.send(seen.append, n)
    clock.run(0.1)
    assert seen == []
    clock.run(100.0)
    assert seen == list(range(50))


def test_a_link_loses_what_it_is_told_to() -> None:
    clock, seen = Clock(), []
    link = Link(clock, np.random.default_rng(0), latency_s=0.0, jitter_s=0.0, loss=0.3)
    for n in range(1000):
        link.send(seen.append, n)
    clock.run(0.0)
    assert 600 < len(seen) < 800


def test_a_device_shares_itself_evenly() -> None:
    clock, done = Clock(), []
    device = Device(clock, "device")
    clock.at(0.0, device.run, 1.0, lambda: done.append(("a", clock.now)))
    clock.at(0.5, device.run, 1.0, lambda: done.append(("b", clock.now)))
    clock.run(10.0)
    # Together from 0.5 on; a has 0.5 left and takes 1.0; b then has 0.5 left, alone.
    assert done == [("a", pytest.approx(1.5)), ("b", pytest.approx(2.0))]


def test_work_of_the_dead_is_dropped_and_the_rest_goes_on() -> None:
    clock, done = Clock(), []

    def dead() -> None:
        raise AssertionError

    device = Device(clock, "device")
    device.run(1.0, dead)
    device.run(1.0, done.append, "alive")
    clock.at(0.5, device.cancel, dead)
    clock.run(1.2)
    assert done == []
    clock.run(1.3)
    assert done == ["alive"]
