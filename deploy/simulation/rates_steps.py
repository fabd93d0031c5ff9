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
from router.step_load import StepLoad

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

_ROWS_SAMPLED: Final = 160
_MOST_STEPS: Final = 16
_FEWEST_STEPS: Final = 4
_SETTLING: Final = 2
"""First steps of a policy, which knows no earlier round yet: played, not counted."""
_SETTLED: Final = 0.5
"""Which requests are how frequent depends on the lengths, and the lengths on that: played again if
they are off by more drafts a row than this."""
_ROWS_STEP: Final = 1.2
_CHUNK_STEP: Final = 2.0
_EXPOSED_STEP: Final = 1.8
"""Steps this close lead to the same lengths, for all that matters."""


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
    """Of a drafting lane at so many rows."""

    tau: float
    """Tokens per row."""
    num_verified: float
    """Drafts verified per row."""
    ends: float
    """Rows that are at the end of their text, as a share."""


class StepSampler:
    """Mean steps by rows, exposed time and prompt tokens; each kind is worked out once.

    Args:
        curve: of the verifier; decisions see the same one (a profile that has been learnt).
        recalibrated: see `BlockSample`.
        explore_fraction: share of row-rounds that are verified whole, as `router.draft_lengths`.
    """

    def __init__(
        self,
        *,
        curve: StepCurve,
        acceptance: AcceptanceModel,
        lengths: LengthMix,
        scheduling: SchedulingConfig,
        explore_fraction: float,
        recalibrated: bool,
    ) -> None:
        self.blocks = BlockSample(acceptance, recalibrated=recalibrated)
        self._curve = curve
        self._lengths = lengths
        self._scheduling = scheduling
        self._deterministic = acceptance.regime != "rejection"
        self._explore_fraction = explore_fraction
        self._found: dict[tuple[int, int, int], MeanStep] = {}
        self._guess = float(self.blocks.gamma)
        """Drafts that are verified of a block, as the latest kind of step has it."""
        self._plain = self._with_ends(1.0, 0.0)

    def mean(self, rows: int, exposed_s: float, *, drafting: bool, chunk: int) -> MeanStep:
        """The mean step of so many rows.

        Steps that carry a prompt chunk are another kind: a chunk may fill what memory takes anyway,
        so that drafts are no longer free.
        """
        if not drafting or not rows:
            return self._plain
        rows, chunk = _rounded(rows, _ROWS_STEP), _rounded(chunk, _CHUNK_STEP)
        least_s = self._curve.step_s(self._load(rows, 0, 0)) / 64
        bucket = round(math.log(max(exposed_s, least_s) / least_s, _EXPOSED_STEP))
        key = (rows, bucket, chunk)
        if key not in self._found:
            exposed_s = least_s * _EXPOSED_STEP**bucket
            tau, num_verified = self._play(rows, exposed_s, chunk, self._guess)
            if abs(self._guess - num_verified) > _SETTLED:
                tau, num_verified = self._play(rows, exposed_s, chunk, num_verified)
            self._guess = num_verified
            self._found[key] = self._with_ends(tau, num_verified)
        return self._found[key]

    def _with_ends(self, tau: float, num_verified: float) -> MeanStep:
        """Means over whole texts, ends included.

        The first token is the prefill's. The last round is cut where the text ends, on average in
        its middle. Every number of tokens is left at the start of one round in tau, and a block
        is verified no further than they reach.
        """
        needed = max(self._lengths.output.mean - 1, 1.0)
        rounds = (needed + (tau - 1) / 2) / tau
        cut = num_verified * (num_verified + 1) / 2 / tau / rounds
        return MeanStep(tau=needed / rounds, num_verified=num_verified - cut, ends=1 / rounds)

    def _play(
        self, rows: int, exposed_s: float, chunk: int, num_verified: float
    ) -> tuple[float, float]:
        """Let a policy decide over a few steps, and count what the blocks are worth: tokens and
        verified drafts per row.

        Args:
            num_verified: about as many, which is what the frequency of texts depends on.
        """
        scheduling, gamma = self._scheduling, self.blocks.gamma
        policy = make_policy(scheduling.policy, min_gain=scheduling.min_gain)
        explored = self._explore_fraction if policy.weighs else 0.0
        num_steps = min(max(-(-_ROWS_SAMPLED // rows), _FEWEST_STEPS), _MOST_STEPS)
        base = self._load(rows, 0, chunk)
        # Drafts do not pay for the prompts beside them, as `router.draft_lengths` has it.
        prompt_s = self._curve.step_s(base) - self._curve.step_s(self._load(rows, 0, 0))
        curve_B = self._curve.curve_s(base, base.num_tokens + rows * gamma)
        curve_B += exposed_s - max(prompt_s, 0.0)
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
            played.append((1 + float(accepted) / rows, num_drafts / rows))
        tau, length = np.mean(played[_SETTLING:], axis=0).tolist()
        return tau, length

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


def _rounded(number: int, step: float) -> int:
    """To a power of ``step``; small ones stay."""
    if number * (step - 1) < 1:
        return number
    return round(step ** round(math.log(number, step)))


def square_ratio(law: LengthSpec) -> float:
    """E[n^2] / E[n]^2."""
    if law.kind == "lognormal":
        return math.exp(law.spread**2)
    return 1 + min(law.spread, 1.0) ** 2 / 3 if law.kind == "uniform" else 1.0
