"""What lanes are made of, as far as the rate model asks. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.config import SchedulingConfig
from deploy.simulation.acceptance import AcceptanceModel
from deploy.simulation.rates_steps import LengthMix, StepSampler
from deploy.simulation.scenario import Scenario
from deploy.simulation.specs import DrafterSpec, LinkSpec, VerifierSpec


@dataclass(frozen=True, kw_only=True)
class PairSpec:
    """What lanes are made of, whatever the size of the pools."""

    verifier: VerifierSpec = field(default_factory=VerifierSpec)
    drafter: DrafterSpec = field(default_factory=DrafterSpec)
    link: LinkSpec = field(default_factory=LinkSpec)
    acceptance: AcceptanceModel = field(default_factory=AcceptanceModel)
    lengths: LengthMix = field(default_factory=LengthMix)
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    prefill_budget: int = 256
    draft_timeout_s: float = 2.0
    explore_fraction: float = 1 / 64
    recalibrated: bool = True

    @property
    def hop_s(self) -> float:
        """Mean of one link, one way."""
        return self.link.latency_s + self.link.jitter_s

    @property
    def most_requests(self) -> int:
        """Requests of one lane: its limit, or as many as have room in its KV."""
        length = self.lengths.prompt.mean + self.lengths.output.mean
        return max(min(self.verifier.max_requests, int(self.verifier.kv_tokens / length)), 1)

    def steps(self) -> StepSampler:
        """Mean steps of such a lane, to be shared by all sizes of pools."""
        return StepSampler(
            curve=self.verifier.curve,
            acceptance=self.acceptance,
            lengths=self.lengths,
            scheduling=self.scheduling,
            explore_fraction=self.explore_fraction,
            recalibrated=self.recalibrated,
        )


def pair_of(scenario: Scenario) -> PairSpec:
    """The lanes of a scenario; jitter of steps and faults are left out."""
    return PairSpec(
        verifier=scenario.verifier,
        drafter=scenario.drafter,
        link=scenario.links,
        acceptance=scenario.acceptance,
        lengths=LengthMix(prompt=scenario.trace.prompt, output=scenario.trace.output),
        scheduling=scenario.router.scheduling,
        prefill_budget=scenario.router.prefill_budget,
        draft_timeout_s=scenario.router.draft_timeout_s,
        explore_fraction=scenario.router.explore_fraction,
        recalibrated=scenario.router.scheduling.recalibrate,
    )
