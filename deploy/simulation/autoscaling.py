"""Where a policy for the size of the pools plugs in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What a policy sees of one cell."""

    now: float
    period_s: float
    """Since the last one."""
    num_verifiers: int
    """Serving, those on their way out not counted."""
    num_drafters: int
    num_starting_verifiers: int
    num_starting_drafters: int
    num_queued: int
    num_running: int
    num_slots: int
    """Requests that the serving verifiers hold at most."""
    tokens_per_s: float
    """Emitted, over the period."""
    verifier_busy: float
    """Share of the verifiers' time in steps, over the period."""
    drafter_busy: float


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How many replicas a cell should have."""

    verifiers: int
    drafters: int


class Autoscaler(Protocol):
    """A policy. It may keep state; it is asked every ``scale_period_s`` of virtual time."""

    def decide(self, seen: Observation) -> Sizes:
        """The wanted sizes."""
        ...
