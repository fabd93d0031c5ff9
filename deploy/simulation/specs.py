"""What simulated pools and links are made of: sections of a scenario. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cluster.sections import natural, one_of, positive
from deploy.simulation.curves import DraftCurve, StepCurve, seconds


def share(default: float = 0.0) -> Any:
    """A number in 0..1."""
    return field(default=default, metadata={"least": 0, "most": 1.0})


@dataclass(frozen=True, kw_only=True)
class VerifierSpec:
    """The verifiers of one cell."""

    num_replicas: int = positive(1)
    curve: StepCurve = field(default_factory=lambda: StepCurve(fixed_s=0.02, per_token_s=0.0001))
    jitter: float = share(0.02)
    """Relative standard deviation of a step's time."""
    profile_factor: float = positive(1.0)
    """What the start-up measurement says, over the truth: for stale or disturbed tables."""
    max_requests: int = positive(64)
    max_step_tokens: int = positive(2048)
    max_model_len: int = positive(1 << 17)
    kv_tokens: int = positive(1 << 20)
    start_s: float = seconds(30.0)
    """From being asked for (by an autoscaler, or after a fault) to serving."""


@dataclass(frozen=True, kw_only=True)
class DrafterSpec:
    """The drafters of one cell."""

    num_replicas: int = natural(1)
    curve: DraftCurve = field(default_factory=DraftCurve)
    jitter: float = share(0.02)
    max_batch: int = positive(256)
    """Most blocks drafted at once; what comes meanwhile waits for the next batch."""
    shares_verifier: bool = False
    """Drafts on the verifiers' devices, as on a laptop: whoever works slows the other."""
    start_s: float = seconds(10.0)


@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """Every stream between members, each way."""

    latency_s: float = seconds(0.0003)
    jitter_s: float = seconds(0.0001)
    """Mean of an exponential delay on top."""
    lost_blocks: float = share()
    """Share of drafters' frames that never arrive."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something goes wrong for a while."""

    kind: str = one_of(
        "drafter_down", "verifier_down", "slow_drafter", "slow_verifier", "lost_blocks"
    )
    at_s: float = seconds()
    for_s: float = positive(5.0)
    index: int = natural(0)
    """Which replica of the pool, counted within the cell."""
    cells: tuple[int, ...] = ()
    """Which cells; all if empty."""
    factor: float = positive(2.0)
    """Slow-downs: times that everything takes."""
    share: float = share(0.5)
    """``lost_blocks``: of the frames."""
