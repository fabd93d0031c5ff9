"""What happens to the pools of a cell while it runs: faults, and changes of size."""

from __future__ import annotations

from collections.abc import Callable

from deploy.simulation.autoscaling import Autoscaler, Observation
from deploy.simulation.clock import Clock
from deploy.simulation.drafter import SimDrafter
from deploy.simulation.intake import Intake
from deploy.simulation.pools import Pools, Usage
from deploy.simulation.scenario import Scenario
from deploy.simulation.specs import Fault


class Operations:
    """Plays the faults of a scenario and follows an autoscaler.

    Args:
        num_tokens: emitted so far.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        pools: Pools,
        intake: Intake,
        clock: Clock,
        autoscaler: Autoscaler | None,
        num_tokens: Callable[[], int],
    ) -> None:
        self._scenario = scenario
        self._pools = pools
        self._intake = intake
        self._clock = clock
        self._autoscaler = autoscaler
        self._num_tokens = num_tokens
        self._num_starting_verifiers = 0
        self._num_starting_drafters = 0
        self._draining: set[str] = set()
        """Drafters."""
        self._seen = Usage()
        self._seen_tokens = 0

    def start(self, cell: int) -> None:
        """Plan everything."""
        for fault in self._scenario.faults:
            if not fault.cells or cell in fault.cells:
                self._clock.at(fault.at_s, self._begin, fault)
        if self._autoscaler is not None:
            self._clock.at(self._scenario.scale_period_s, self._scale)

    # --- faults -------------------------------------------------------------------------------

    def _begin(self, fault: Fault) -> None:
        """Of a replica that is not there, nothing."""
        pools, end_s = self._pools, self._clock.now + fault.for_s
        if fault.kind.endswith("verifier") or fault.kind.startswith("verifier"):
            numbers = sorted(pools.lanes)[fault.index : fault.index + 1]
            for number in numbers:
                self._strike_verifier(number, fault, end_s)
        else:
            for name in list(pools.drafters)[fault.index : fault.index + 1]:
                self._strike_drafter(pools.drafters[name], fault, end_s)

    def _strike_verifier(self, number: int, fault: Fault, end_s: float) -> None:
        if fault.kind == "verifier_down":
            self._intake.take_back(self._pools.stop_verifier(number))
            self._clock.at(end_s, self._pools.start_verifier)
        else:
            verifier = self._pools.lanes[number].verifier
            verifier.slowness = fault.factor
            self._clock.at(end_s, setattr, verifier, "slowness", 1.0)

    def _strike_drafter(self, drafter: SimDrafter, fault: Fault, end_s: float) -> None:
        if fault.kind == "drafter_down":
            if drafter.live:
                self._pools.kill_drafter(drafter.ref.drafter_id)
                self._clock.at(end_s, self._pools.revive_drafter, drafter.ref.drafter_id)
        elif fault.kind == "slow_drafter":
            drafter.slowness = fault.factor
            self._clock.at(end_s, setattr, drafter, "slowness", 1.0)
        else:
            drafter.link.loss = fault.share
            usual = self._scenario.links.lost_blocks
            self._clock.at(end_s, setattr, drafter.link, "loss", usual)

    # --- sizes --------------------------------------------------------------------------------

    def _scale(self) -> None:
        assert self._autoscaler is not None
        wanted = self._autoscaler.decide(self._observation())
        self._retire_empty()
        serving = sorted(n for n, lane in self._pools.lanes.items() if not lane.draining)
        for _ in range(wanted.verifiers - len(serving) - self._num_starting_verifiers):
            self._num_starting_verifiers += 1
            self._clock.at(self._clock.now + self._scenario.verifier.start_s, self._verifier_is_up)
        for number in serving[max(wanted.verifiers, 0) :]:
            self._pools.lanes[number].draining = True
        drafting = [name for name in self._pools.drafters if name not in self._draining]
        for _ in range(wanted.drafters - len(drafting) - self._num_starting_drafters):
            self._num_starting_drafters += 1
            self._clock.at(self._clock.now + self._scenario.drafter.start_s, self._drafter_is_up)
        for name in drafting[max(wanted.drafters, 0) :]:
            self._draining.add(name)
            self._pools.drain_drafter(name)
        self._clock.at(self._clock.now + self._scenario.scale_period_s, self._scale)

    def _retire_empty(self) -> None:
        for number, lane in list(self._pools.lanes.items()):
            if lane.draining and not lane.state.requests:
                self._pools.stop_verifier(number)
        bound = self._pools.num_bound()
        for name in sorted(self._draining):
            if not bound.get(name, 0):
                self._draining.discard(name)
                self._pools.stop_drafter(name)

    def _verifier_is_up(self) -> None:
        self._num_starting_verifiers -= 1
        self._pools.start_verifier()

    def _drafter_is_up(self) -> None:
        self._num_starting_drafters -= 1
        self._pools.start_drafter()

    def _observation(self) -> Observation:
        usage, num_tokens = self._pools.usage(), self._num_tokens()
        new = usage.since(self._seen)
        tokens_per_s = (num_tokens - self._seen_tokens) / self._scenario.scale_period_s
        self._seen, self._seen_tokens = usage, num_tokens
        serving = [lane for lane in self._pools.lanes.values() if not lane.draining]
        return Observation(
            now=self._clock.now,
            period_s=self._scenario.scale_period_s,
            num_verifiers=len(serving),
            num_drafters=len(self._pools.drafters) - len(self._draining),
            num_starting_verifiers=self._num_starting_verifiers,
            num_starting_drafters=self._num_starting_drafters,
            num_queued=self._intake.num_queued,
            num_running=self._intake.num_running,
            num_slots=sum(lane.state.lease.max_requests for lane in serving),
            tokens_per_s=tokens_per_s,
            verifier_busy=new.verifier_busy_s / max(new.verifier_s, 1e-9),
            drafter_busy=new.drafter_busy_s / max(new.drafter_s, 1e-9),
        )
