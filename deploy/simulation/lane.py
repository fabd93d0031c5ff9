"""The loop of one lane on the virtual clock: what `router.lane.Lane` does, without the I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from cluster.wire import StepResult
from deploy.simulation.clock import Clock, Link
from deploy.simulation.verifier import SimVerifier
from router.blocks import DraftBlock
from router.lane_request import LaneRequest, Outcome
from router.placement import LaneLoad
from router.rounds import LaneState

OnOutcomes = Callable[["SimLane", StepResult, list[Outcome]], None]


class SimLane:
    """Drives a `LaneState` over a simulated verifier.

    Args:
        number: of the lane, never used twice.
        to_verifier: its stream.
        on_outcomes: called with what each result means.
    """

    def __init__(
        self,
        *,
        number: int,
        state: LaneState,
        verifier: SimVerifier,
        to_verifier: Link,
        clock: Clock,
        on_outcomes: OnOutcomes,
    ) -> None:
        self.number = number
        self.state = state
        self.verifier = verifier
        self.draining = False
        self._to_verifier = to_verifier
        self._clock = clock
        self._on_outcomes = on_outcomes
        self._armed_s = math.inf
        self._closed = False
        verifier.serve(self, self.take_result)

    # --- the round ----------------------------------------------------------------------------

    def pump(self) -> None:
        """Hand over every step that is due; wake up when the next one is."""
        now, state = self._clock.now, self.state
        while not self._closed:
            at = state.next_step_at(now)
            if at > now:
                self._arm(at)
                return
            rows = state.ready_rows(now)
            lengths = state.schedule(rows, now=now)
            step = state.dispatch(rows, lengths, now)
            self._to_verifier.send(self.verifier.take, step)

    def take_result(self, result: StepResult) -> None:
        """The frame that answers a step."""
        if self._closed:
            return
        outcomes = self.state.apply(result, self._clock.now)
        self._on_outcomes(self, result, outcomes)
        self.pump()

    def take_blocks(self, drafter_id: str, blocks: Iterable[DraftBlock]) -> None:
        """One frame of a drafter."""
        if self._closed:
            return
        self.state.take_blocks(drafter_id, blocks, self._clock.now)
        self.pump()

    def lose_drafter(self, drafter_id: str) -> None:
        """The stream to a drafter has ended."""
        self.state.lose_drafter(drafter_id, self._clock.now)
        self.pump()

    # --- requests -----------------------------------------------------------------------------

    def submit(self, request: LaneRequest) -> None:
        """Take a request that fits; `pump` then."""
        self.state.add(request, self._clock.now)

    def load(self, num_tokens: int) -> LaneLoad:
        """How full the lane is, and whether a request of so many positions can start."""
        return LaneLoad(
            lane_id=self.number,
            fits=not self.draining and self.state.fits(num_tokens),
            num_requests=len(self.state.requests),
            max_requests=self.state.lease.max_requests,
        )

    def close(self) -> None:
        """The verifier is gone. Its requests are the caller's."""
        self._closed = True
        self.verifier.die()
        for rid in list(self.state.requests):
            self.state.end(rid)

    def _arm(self, at: float) -> None:
        if at < self._armed_s:
            self._armed_s = at
            self._clock.at(at, self._wake, at)

    def _wake(self, at: float) -> None:
        if at == self._armed_s:
            self._armed_s = math.inf
            self.pump()
