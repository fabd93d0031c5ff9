"""The mean step of a lane at a given number of rows: lengths by the policy, over sampled blocks.

Shape legend: R rows, G gamma, B tokens of a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.config import SchedulingConfig
from deploy.simulation.acceptance import AcceptanceModel
from deploy.simulation.curves import StepCurve
from deploy.simulation.rates_blocks import BlockSample
from deploy.simulation.traces import LengthSpec
from router.policies import PolicyInput, make_policy
from router.prompt_budget import chunk_tokens, least_chunk
from router.step_load import StepLoad

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

_ROWS_SAMPLED: Final = 256
_MOST_STEPS: Final = 24
_FEWEST_STEPS: Final = 6
_SETTLING: Final = 2
"""First steps of a policy, which knows no earlier round yet: played, not counted."""
_SETTLED: Final = 0.5
"""Which requests are how frequent depends on the lengths, and the lengths on that: played again if
they are off by more drafts a row than this."""
_CHUNK_STEP: Final = 1.1
_EXPOSED_STEP: Final = 1.25
"""Exposed times this close lead to the same lengths, for all that matters."""


@dataclass(frozen=True, kw_only=True)
class LengthMix:
    """Prompt and output lengths, as far as rates depend on them."""

    prompt: LengthSpec = field(default_factory=lambda: LengthSpec(mean=256))
    output: LengthSpec = field(default_factory=lambda: LengthSpec(mean=256))

    @property
    def mean_context(self) -> float:
        """Positions behind a row, at a random time of a random decode: the long ones last."""
        return self.prompt.mean + self.output.mean * square_ratio(self.output) / 2


@dataclass(frozen=True, kw_only=True)
class MeanStep:
    """Means over the steps of a regime."""

    tau: float
    """Tokens per row."""
    num_verified: float
    """Drafts verified per row."""
    step_s: float

    def mixed(self, other: MeanStep, share: float) -> MeanStep:
        """Of a lane that plays ``other`` for this share of its steps."""
        return MeanStep(
            tau=(1 - share) * self.tau + share * other.tau,
            num_verified=(1 - share) * self.num_verified + share * other.num_verified,
            step_s=(1 - share) * self.step_s + share * other.step_s,
        )


class StepSampler:
    """Mean steps by rows and exposed time; each is worked out once.

    Args:
        curve: of the verifier; decisions see the same one (a profile that has been learnt).
        recalibrated: see `BlockSample`.
        prefill_budget: most prompt tokens of a step.
        explore_fraction: share of row-rounds that are verified whole, as `router.draft_lengths`.
    """

    def __init__(
        self,
        *,
        curve: StepCurve,
        acceptance: AcceptanceModel,
        lengths: LengthMix,
        scheduling: SchedulingConfig,
        prefill_budget: int,
        explore_fraction: float,
        recalibrated: bool,
    ) -> None:
        self.blocks = BlockSample(acceptance, recalibrated=recalibrated)
        self._curve = curve
        self._lengths = lengths
        self._scheduling = scheduling
        self._deterministic = acceptance.regime != "rejection"
        self._prefill_budget = prefill_budget
        self._explore_fraction = explore_fraction
        self._found: dict[tuple[int, int, int], MeanStep] = {}

    def most_chunk(self, rows: float, num_verified: float) -> int:
        """Prompt tokens that a step of so many rows, with so many drafts each, can carry."""
        whole, num_drafts = round(max(rows, 1)), round(rows * num_verified)
        alone_s = self._curve.step_s(self._load(whole, num_drafts, 0))
        return chunk_tokens(
            lambda chunk: self._curve.step_s(self._load(whole, num_drafts, chunk)),
            limit_s=alone_s * (1 + self._scheduling.prefill_stretch),
            least=least_chunk(self._prefill_budget),
            most=self._prefill_budget,
        )

    def chunks(self, most: int, per_step: float) -> tuple[int, float]:
        """Prompt tokens of a step that carries any, and the share of steps that do. Prompts come by
        chance, so several may meet in one.

        Args:
            most: see `most_chunk`.
            per_step: prompt tokens, mean over all steps.
        """
        one = min(self._lengths.prompt.mean, float(most))
        share = -math.expm1(-per_step / one)
        tokens = min(per_step / share, float(most)) if share else one
        # Steps with about the same chunk are decided about alike.
        rounded = math.exp(round(math.log(tokens, _CHUNK_STEP)) * math.log(_CHUNK_STEP))
        return max(round(rounded), 1), min(per_step / max(rounded, 1.0), 1.0)

    def mean(self, rows: float, exposed_s: float, *, drafting: bool, chunk: int) -> MeanStep:
        """The mean step of so many rows; of a fraction, so many steps are larger by one.

        Steps that carry a prompt chunk are another kind: they take long anyway, so that drafts are
        cheap in them.
        """
        step = self._drafted if drafting else self._plain
        whole = int(rows)
        if rows == whole:
            return step(whole, exposed_s, chunk)
        more = step(whole + 1, exposed_s, chunk)
        return step(whole, exposed_s, chunk).mixed(more, rows - whole) if whole else more

    def _plain(self, rows: int, exposed_s: float, chunk: int) -> MeanStep:
        step_s = self._curve.step_s(self._load(rows, 0, chunk))
        return MeanStep(tau=1.0, num_verified=0.0, step_s=step_s)

    def _drafted(self, rows: int, exposed_s: float, chunk: int) -> MeanStep:
        least_s = self._curve.step_s(self._load(rows, 0, 0)) / 64
        bucket = round(math.log(max(exposed_s, least_s) / least_s, _EXPOSED_STEP))
        key = (rows, bucket, chunk)
        if key not in self._found:
            exposed_s, guess = least_s * _EXPOSED_STEP**bucket, float(self.blocks.gamma)
            step = self._play(rows, exposed_s, chunk, guess)
            if guess - step.num_verified > _SETTLED:
                step = self._play(rows, exposed_s, chunk, step.num_verified)
            self._found[key] = step
        return self._found[key]

    def _play(self, rows: int, exposed_s: float, chunk: int, num_verified: float) -> MeanStep:
        """Let a policy decide over a few steps, and count what the blocks are worth."""
        scheduling, gamma = self._scheduling, self.blocks.gamma
        policy = make_policy(scheduling.policy, min_gain=scheduling.min_gain)
        explored = self._explore_fraction if policy.weighs else 0.0
        num_steps = min(max(-(-_ROWS_SAMPLED // rows), _FEWEST_STEPS), _MOST_STEPS)
        base = self._load(rows, 0, chunk)
        curve_B = self._curve.curve_s(base, base.num_tokens + rows * gamma) + exposed_s
        played = []
        for true_RG, stated_RG in self.blocks.steps(rows, _SETTLING + num_steps, num_verified):
            seen = PolicyInput(
                survival_RG=stated_RG,
                num_drafts_R=np.full(rows, gamma),
                deterministic_R=np.full(rows, self._deterministic),
                weight_R=np.ones(rows),
                rids=np.arange(rows, dtype=np.int64),
                step_s_B=curve_B,
                num_fixed_tokens=base.num_prefill,
            )
            chosen_RG = np.arange(gamma) < policy.lengths(seen)[:, None]
            policy.remember(seen)
            accepted = true_RG[chosen_RG].sum() + explored * true_RG[~chosen_RG].sum()
            num_drafts = float(chosen_RG.sum() + explored * (~chosen_RG).sum())
            step_s = self._curve.step_s(self._load(rows, round(num_drafts), chunk))
            played.append((1 + float(accepted) / rows, num_drafts / rows, step_s))
        tau, length, step_s = np.mean(played[_SETTLING:], axis=0).tolist()
        return MeanStep(tau=tau, num_verified=length, step_s=step_s)

    def _load(self, rows: int, num_drafts: int, chunk: int) -> StepLoad:
        context = rows * self._lengths.mean_context
        if chunk:
            context += self._lengths.prompt.mean / 2
        return StepLoad(
            num_rows=rows,
            num_tokens=rows + num_drafts + chunk,
            num_prefill=chunk,
            sum_context=round(context),
        )


def square_ratio(law: LengthSpec) -> float:
    """E[n^2] / E[n]^2."""
    if law.kind == "lognormal":
        return math.exp(law.spread**2)
    return 1 + min(law.spread, 1.0) ** 2 / 3 if law.kind == "uniform" else 1.0
