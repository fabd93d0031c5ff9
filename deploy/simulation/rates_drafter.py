"""A drafter that knows how many blocks it drafts, not whose: see `rates_play`."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

import numpy as np

from deploy.simulation.clock import Clock, Device, Link
from deploy.simulation.drafter import jitter
from deploy.simulation.specs import DrafterSpec
from router.link_profile import LinkProfile


class Bunch(NamedTuple):
    """Blocks that a step asks of one drafter."""

    lane: BunchTaker
    drafter: int
    asked_at: float
    """Names the step."""
    num_blocks: int
    num_rows: int
    """Positions to take in first."""
    came_s: float = 0.0
    """Seconds on the clock at which the drafter has it."""


class BunchTaker(Protocol):
    """A lane, as drafters see it."""

    def take_blocks(self, bunch: Bunch, draft_s: float) -> None:
        """Blocks have come."""
        ...


class CountedDrafter:
    """One replica: a batch at a time, of all that has come.

    Args:
        number: its index.
        to_lanes: link to the router.
        bound_s: of its link's profile.
    """

    def __init__(
        self,
        number: int,
        spec: DrafterSpec,
        *,
        clock: Clock,
        device: Device,
        to_lanes: Link,
        bound_s: float,
        rng: np.random.Generator,
    ) -> None:
        self.number = number
        self.device = device
        self.profile = LinkProfile(bound_s)
        self.num_bound = 0
        self.busy_s = 0.0
        self._spec = spec
        self._clock = clock
        self._to_lanes = to_lanes
        self._rng = rng
        self._waiting: deque[Bunch] = deque()
        self._busy = False

    def take(self, bunch: Bunch) -> None:
        """Blocks are asked for."""
        self._waiting.append(bunch._replace(came_s=self._clock.now))
        if not self._busy:
            self._begin()

    def _begin(self) -> None:
        batch = [self._waiting.popleft()]
        num_blocks = batch[0].num_blocks
        while self._waiting and num_blocks + self._waiting[0].num_blocks <= self._spec.max_batch:
            batch.append(self._waiting.popleft())
            num_blocks += batch[-1].num_blocks
        self._busy = True
        work_s = self._spec.curve.draft_s(num_blocks, sum(bunch.num_rows for bunch in batch))
        work_s *= jitter(self._rng, self._spec.jitter)
        self.device.run(work_s, self._finish, batch, self._clock.now)

    def _finish(self, batch: list[Bunch], began_s: float) -> None:
        now, self._busy = self._clock.now, False
        self.busy_s += now - began_s
        for bunch in batch:
            self._to_lanes.send(bunch.lane.take_blocks, bunch, now - bunch.came_s)
        if self._waiting:
            self._begin()
