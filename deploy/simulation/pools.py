"""The pools of one cell: replicas come, go, fail and return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from deploy.simulation.clock import Clock, Device, Link
from deploy.simulation.drafter import FINGERPRINT, SimDrafter
from deploy.simulation.lane import OnOutcomes, SimLane
from deploy.simulation.leases import lease_of
from deploy.simulation.scenario import Scenario
from deploy.simulation.verifier import SimVerifier
from router.counters import LaneCounters
from router.drafter_book import DrafterBook
from router.lane_setup import lane_state
from router.recalibration import RecalibratorBook


@dataclass(kw_only=True)
class Usage:
    """Seconds of replicas so far, those that are gone included."""

    verifier_busy_s: float = 0.0
    verifier_s: float = 0.0
    drafter_busy_s: float = 0.0
    drafter_s: float = 0.0
    num_batches: int = 0
    num_blocks: int = 0

    def since(self, before: Usage) -> Usage:
        """The difference."""
        names = [f.name for f in dataclasses.fields(Usage)]
        return Usage(**{name: getattr(self, name) - getattr(before, name) for name in names})


class Pools:
    """Verifiers, each with its lane, and drafters.

    Args:
        num_outputs: length of every live request's text by key.
        on_outcomes: what lanes call with results.
        on_room: called when a lane has come.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        cell: int,
        clock: Clock,
        counters: LaneCounters,
        num_outputs: dict[int, int],
        on_outcomes: OnOutcomes,
        on_room: Callable[[], None],
    ) -> None:
        self.lanes: dict[int, SimLane] = {}
        """By number, those on their way out included."""
        self.drafters: dict[str, SimDrafter] = {}
        self._scenario = scenario
        self._cell = cell
        self._clock = clock
        self._counters = counters
        self._num_outputs = num_outputs
        self._on_outcomes = on_outcomes
        self._on_room = on_room
        self._book = DrafterBook(scenario.router.draft_timeout_s)
        self._recalibrators = RecalibratorBook(enabled=scenario.router.scheduling.recalibrate)
        self._seeds = self._rngs()
        self._num_lanes = 0
        self._num_drafters = 0
        self._gone = Usage()
        self._born: dict[int | str, float] = {}

    # --- verifiers ----------------------------------------------------------------------------

    def start_verifier(self) -> None:
        """A verifier registers; the router takes it."""
        scenario, number = self._scenario, self._num_lanes
        self._num_lanes += 1
        verifier = SimVerifier(
            scenario.verifier,
            model=scenario.acceptance,
            num_outputs=self._num_outputs,
            drafters=self.drafters,
            clock=self._clock,
            device=Device(self._clock, f"verifier-{number}"),
            link=self._link(),
            to_drafters=self._link(),
            rng=next(self._seeds),
        )
        state = lane_state(
            lease_of(scenario.verifier, lane_epoch=number + 1),
            fingerprint=FINGERPRINT,
            config=scenario.router,
            book=self._book,
            counters=self._counters,
            recalibrators=self._recalibrators,
            device=verifier.device.name,
        )
        self.lanes[number] = SimLane(
            number=number,
            state=state,
            verifier=verifier,
            to_verifier=self._link(),
            clock=self._clock,
            on_outcomes=self._on_outcomes,
        )
        self._born[number] = self._clock.now
        self._on_room()

    def stop_verifier(self, number: int) -> SimLane:
        """It is gone, with everything; its lane, closed, to take the requests of."""
        lane = self.lanes.pop(number)
        lane.close()
        self._gone.verifier_busy_s += lane.verifier.busy_s
        self._gone.verifier_s += self._clock.now - self._born.pop(number)
        return lane

    # --- drafters -----------------------------------------------------------------------------

    def start_drafter(self) -> None:
        """A drafter registers; the router dials it."""
        drafter = SimDrafter(
            f"drafter-{self._num_drafters}",
            self._scenario.drafter,
            model=self._scenario.acceptance,
            clock=self._clock,
            device=self._drafter_device(),
            link=self._link(lost=self._scenario.links.lost_blocks),
            rng=next(self._seeds),
        )
        self._num_drafters += 1
        self.drafters[drafter.ref.drafter_id] = drafter
        self._join(drafter)

    def drain_drafter(self, drafter_id: str) -> None:
        """Bind nobody to it any more."""
        self._book.set_load(drafter_id, 0.0, draining=True)

    def stop_drafter(self, drafter_id: str) -> None:
        """It is gone for good."""
        drafter = self.drafters[drafter_id]
        if drafter.live:
            self.kill_drafter(drafter_id)
        self._gone.drafter_busy_s += drafter.busy_s
        self._gone.num_batches += drafter.num_batches
        self._gone.num_blocks += drafter.num_blocks
        del self.drafters[drafter_id]

    def kill_drafter(self, drafter_id: str) -> None:
        """Its stream ends; it may return with nothing."""
        drafter = self.drafters[drafter_id]
        drafter.die()
        self._gone.drafter_s += self._clock.now - self._born.pop(drafter_id)
        self._book.down(drafter_id)
        for lane in tuple(self.lanes.values()):
            lane.lose_drafter(drafter_id)

    def revive_drafter(self, drafter_id: str) -> None:
        """It is back, if it has not been stopped meanwhile."""
        drafter = self.drafters.get(drafter_id)
        if drafter is not None and not drafter.live:
            drafter.revive()
            self._join(drafter)

    def num_bound(self) -> dict[str, int]:
        """Requests bound to each live drafter."""
        return self._book.num_bound()

    # --- both ---------------------------------------------------------------------------------

    def usage(self) -> Usage:
        """Up to now."""
        now, total = self._clock.now, dataclasses.replace(self._gone)
        for number, lane in self.lanes.items():
            total.verifier_busy_s += lane.verifier.busy_s
            total.verifier_s += now - self._born[number]
        for name, drafter in self.drafters.items():
            total.drafter_busy_s += drafter.busy_s
            total.num_batches += drafter.num_batches
            total.num_blocks += drafter.num_blocks
            if drafter.live:
                total.drafter_s += now - self._born[name]
        return total

    def _join(self, drafter: SimDrafter) -> None:
        self._born[drafter.ref.drafter_id] = self._clock.now
        self._book.up(drafter.ref)

    def _drafter_device(self) -> Device:
        if self._scenario.drafter.shares_verifier and self.lanes:
            numbers = sorted(self.lanes)
            return self.lanes[numbers[self._num_drafters % len(numbers)]].verifier.device
        return Device(self._clock, f"drafter-{self._num_drafters}")

    def _link(self, lost: float = 0.0) -> Link:
        links = self._scenario.links
        return Link(
            self._clock,
            next(self._seeds),
            latency_s=links.latency_s,
            jitter_s=links.jitter_s,
            loss=lost,
        )

    def _rngs(self) -> Iterator[np.random.Generator]:
        """Streams of their own for whoever needs chance, the same ones in every run."""
        root = np.random.SeedSequence([self._scenario.seed, self._cell, 1])
        while True:
            yield np.random.default_rng(root.spawn(1)[0])
