"""The steps that a verifier has been handed: one runs, at most one is queued behind it. Pure.

Also what the lane learns about the road there: how long a frame takes to the verifier and back
beside the step itself, how long the verifier takes from one queued step to the next, and how far
predicted ends are off. So a step can be handed over just before the running one ends.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

from router.blocks import DraftBlock
from router.step_frame import PlannedRow

MOST: Final = 2
_GAIN: Final = 0.1
_DEVIATIONS: Final = 2.0
"""A step is handed over so many mean deviations before the running one is predicted to end."""
_MOST_MARGIN: Final = 0.5
"""Of the running step's time."""


@dataclass(frozen=True, kw_only=True)
class Flight:
    """A step that was handed over and has not come back."""

    step_id: int
    rows: dict[int, PlannedRow]
    blocks: dict[int, DraftBlock]
    """By request: what it has in the step."""
    drafting: frozenset[int]
    """Rows whose last round had asked for a block, whether it came or not."""
    rebound: frozenset[int]
    """Requests whose draft sessions it opens anew."""
    num_asked: int
    """Rows that ask for their next block."""
    num_admitted: int
    """Prompt tokens of the requests that it admits."""
    num_prefill: int
    """Prompt tokens that it computes at most."""
    sent: float
    predicted_s: float
    """Time of the step by itself."""

    def asked(self) -> Counter[str]:
        """Blocks that its rows ask for, by drafter; those that have lost theirs get none."""
        drafters = (row.request.drafter for row in self.rows.values() if row.want_draft)
        return Counter(drafter.drafter_id for drafter in drafters if drafter is not None)


class _Mean:
    """A running mean; the first few samples count alike."""

    def __init__(self) -> None:
        self.value = 0.0
        self._num_samples = 0

    def add(self, sample: float) -> None:
        self._num_samples += 1
        self.value += max(_GAIN, 1 / self._num_samples) * (sample - self.value)


class Flights:
    """Steps in the air, oldest first."""

    def __init__(self) -> None:
        self.steps: deque[Flight] = deque()
        """Oldest first: its result comes next."""
        self._landed = float("-inf")
        self._link_s = _Mean()
        self._turn_s = _Mean()
        self._early_s = _Mean()
        """How much earlier than predicted results come."""
        self._deviation_s = _Mean()

    @property
    def link_s(self) -> float:
        """From handing a step to an idle verifier to its result, beside the time of the step."""
        return self._link_s.value

    @property
    def turn_s(self) -> float:
        """From a result to the next one, beside its step's time, if that was queued in time."""
        return self._turn_s.value

    @property
    def lead_s(self) -> float:
        """How long before its predicted result the next step is handed over."""
        if not self.steps:
            return 0.0
        margin_s = max(self._early_s.value + _DEVIATIONS * self._deviation_s.value, 0.0)
        return self.link_s + min(margin_s, _MOST_MARGIN * self.steps[-1].predicted_s)

    def lands_at(self, now: float) -> float:
        """When the last result is expected, not before ``now``; minus infinity if there is none."""
        at = self._landed
        for step in self.steps:
            at = self._lands(step, at)
        return max(at, now) if self.steps else float("-inf")

    def take_off(self, flight: Flight) -> None:
        """A step is handed over."""
        assert len(self.steps) < MOST, "one step runs, one waits"
        self.steps.append(flight)

    def land(self, now: float, step_s: float) -> Flight:
        """The first step is back, after ``step_s`` seconds of work; learn from it."""
        flight = self.steps.popleft()
        error_s = self._lands(flight, self._landed) - now
        self._deviation_s.add(abs(error_s - self._early_s.value))
        self._early_s.add(error_s)
        if flight.sent < self._landed:
            self._turn_s.add(max(now - self._landed - step_s, 0.0))
        else:
            self._link_s.add(max(now - flight.sent - step_s, 0.0))
        self._landed = now
        return flight

    def gap_s(self, now: float, step_s: float) -> float:
        """Of a result that comes now: time since the last one in which no step ran."""
        return max(now - self._landed - step_s, 0.0)

    def _lands(self, flight: Flight, before: float) -> float:
        """When a step is back if the one ahead of it is back at ``before``."""
        if flight.sent < before:
            start = max(before + self.turn_s, flight.sent + self.link_s)
        else:
            start = flight.sent + self.link_s
        return start + flight.predicted_s
