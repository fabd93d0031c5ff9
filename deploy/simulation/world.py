"""One cell of a cluster on a virtual clock: a router with its lanes, drafters and clients.

The lanes run the very code that serves (`router.rounds` and all that it uses); engines, links and
clients are simulated. A run is a function of scenario, cell and autoscaler alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cluster.wire import StepResult
from deploy.simulation.autoscaling import Autoscaler
from deploy.simulation.clock import Clock
from deploy.simulation.intake import Intake
from deploy.simulation.lane import SimLane
from deploy.simulation.operations import Operations
from deploy.simulation.pools import Pools, Usage
from deploy.simulation.scenario import Scenario
from deploy.simulation.scoring import Scorer
from deploy.simulation.tally import Tally
from deploy.simulation.traces import Trace
from router.counters import LaneCounters
from router.lane_request import Outcome

_SLICES: Final = 20
"""Reports of progress."""


class World:
    """One cell.

    Args:
        cell: which one; traffic and faults differ.
        autoscaler: changes the pools while it runs; None: they stay as they are.

    Raises:
        ConfigError: a trace file that cannot be read.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        cell: int = 0,
        autoscaler: Autoscaler | None = None,
    ) -> None:
        self.scenario = scenario
        self.clock = Clock()
        self.counters = LaneCounters()
        self.scorer = Scorer(
            clock=self.clock,
            counters=self.counters,
            duration_s=scenario.duration_s,
            warmup_s=scenario.warmup_s,
        )
        num_outputs: dict[int, int] = {}
        self.pools = Pools(
            scenario,
            cell=cell,
            clock=self.clock,
            counters=self.counters,
            num_outputs=num_outputs,
            on_outcomes=self._take_outcomes,
            on_room=lambda: self.intake.place(),
        )
        self.intake = Intake(
            trace=Trace(
                scenario.trace,
                cell=cell,
                num_cells=scenario.cells,
                seed=scenario.seed,
            ),
            config=scenario.router,
            model=scenario.acceptance,
            lanes=self.pools.lanes,
            num_outputs=num_outputs,
            clock=self.clock,
            scorer=self.scorer,
        )
        self.operations = Operations(
            scenario,
            pools=self.pools,
            intake=self.intake,
            clock=self.clock,
            autoscaler=autoscaler,
            num_tokens=lambda: self.counters.num_emitted,
        )
        self._cell = cell
        self._usage = Usage()

    def run(self, progress: Callable[[float], None] | None = None) -> Tally:
        """Play the scenario, once.

        Args:
            progress: called now and then with the share of the run since its last call.
        """
        scenario, clock = self.scenario, self.clock
        for _ in range(scenario.verifier.num_replicas):
            self.pools.start_verifier()
        for _ in range(scenario.drafter.num_replicas):
            self.pools.start_drafter()
        clock.at(scenario.warmup_s, self._begin)
        self.operations.start(self._cell)
        self.intake.start()
        for part in range(1, _SLICES + 1):
            clock.run(scenario.duration_s * part / _SLICES)
            if progress is not None:
                progress(1 / _SLICES)
        return self._end()

    def _take_outcomes(self, lane: SimLane, result: StepResult, outcomes: list[Outcome]) -> None:
        self.intake.take_outcomes(lane, result, outcomes)
        self.scorer.running(self.intake.num_running)

    def _begin(self) -> None:
        self.scorer.begin()
        self._usage = self.pools.usage()

    def _end(self) -> Tally:
        tally, used = self.scorer.end(), self.pools.usage().since(self._usage)
        tally.verifier_busy_s, tally.verifier_s = used.verifier_busy_s, used.verifier_s
        tally.drafter_busy_s, tally.drafter_s = used.drafter_busy_s, used.drafter_s
        tally.num_batches, tally.num_blocks = used.num_batches, used.num_blocks
        return tally
