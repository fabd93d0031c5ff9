"""The loop around a lane's state: what wakes it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

import numpy as np

from cluster.config import SchedulingConfig
from cluster.wire import Frame, Step
from router.lane import Lane
from tests.router.lane_rig import Rig


class SilentVerifier:
    """A stream on which nothing ever comes back."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    async def send(self, frame: Frame) -> None:
        assert isinstance(frame, Step)
        self.steps.append(frame)

    async def recv(self) -> Frame:
        return await asyncio.Future()

    def try_send(self, frame: Frame) -> bool:
        return True

    async def close(self) -> None:
        pass


def make_lane(rig: Rig, stream: Any) -> Lane:
    return Lane(
        number=1,
        stream=stream,
        state=rig.state,
        rids=itertools.count(1),
        step_timeout_s=60.0,
        on_change=lambda: None,
        on_return=lambda ticket, reason: None,
        clock=lambda: rig.now,
    )


async def turns() -> None:
    """Whoever can go on goes on, and no time passes."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_another_scheduling_is_followed_though_the_lane_sleeps() -> None:
    rig = Rig()
    rig.state.configure(SchedulingConfig(gather="wait_for_all"))
    for rid in (1, 2):
        rig.add(rid)
    rig.prefill(1, 2)
    rig.answer(1)
    verifier = SilentVerifier()
    lane = make_lane(rig, verifier)
    run = asyncio.create_task(lane.run())
    await turns()
    assert verifier.steps == [], "the other block is waited for"
    lane.configure(SchedulingConfig(gather="when_free"))
    await turns()
    assert len(verifier.steps) == 1, "the lane slept on"
    np.testing.assert_array_equal(verifier.steps[0].rid, [1])
    run.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await run
