"""What a budget policy is given, and what it must answer.

Exactness in rejection mode (DESIGN section 5) hangs on what a length may depend on. A policy sees
the survival values of this step's blocks, and each of them is a function of drawn tokens. So every
policy says in its docstring why its lengths do not depend on a token that they decide about, and
`tests/exactness/test_policies.py` enumerates it.

Shape legend of the package: R requests, G places of a block, N drafts in walk order, B tokens to
the target in one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from router.policies.walk import F32, F64, I32, I64, Bools, falling, rates


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyInput:
    """One step, before its draft lengths are chosen. Nobody changes the arrays afterwards."""

    survival_RG: F64
    """``a_{r,j}``, product of the confidences up to j; not rising along a row, 0 where there is no
    draft."""
    num_drafts_R: I64
    """Drafts in hand that may be verified. Not to be read off the survival: a draft that is sure to
    fail has survival 0 too, and which those are depends on what was drawn."""
    deterministic_R: Bools
    """Whether nothing was drawn for the row's drafts: greedy, one-hot, coupled, or none at all."""
    weight_R: F64
    """What a token of the request is worth, over 0; a function of history only, see `router.slo`.
    """
    rids: I64
    """[R] request ids."""
    step_s_B: F64
    """Seconds of a step of B tokens, time between steps included, valid from the step without
    drafts up; its length caps the step."""
    num_fixed_tokens: int = 0
    """Tokens of the step that are decided already (prompt chunks): they count in B and emit
    nothing."""

    def __post_init__(self) -> None:
        survival_RG = self.survival_RG
        assert self.room >= 0, f"{len(self.step_s_B)} step times for {self.base} tokens"
        assert survival_RG.size == 0 or (survival_RG.min() >= 0 and survival_RG.max() <= 1)
        assert (survival_RG[:, 1:] <= survival_RG[:, :-1]).all(), "survival rises along a block"

    @property
    def base(self) -> int:
        """Tokens of the step without drafts."""
        return len(self.survival_RG) + self.num_fixed_tokens

    @property
    def room(self) -> int:
        """Drafts that fit into the step."""
        return len(self.step_s_B) - 1 - self.base

    @cached_property
    def gains(self) -> F32:
        """What verifying each draft is expected to add [R, G]: survival times weight. In fp32, as
        drafters report confidences: sorting is most of a decision, and it takes half the time."""
        gains: F32 = self.survival_RG.astype(np.float32)
        gains *= self.weight_R[:, None].astype(np.float32)
        return gains

    @cached_property
    def falling(self) -> F32:
        """The gains over 0 in walk order [N], see `router.policies.walk`."""
        return falling(self.gains)

    @cached_property
    def weight(self) -> float:
        """Of all requests together."""
        return float(self.weight_R.sum())

    @cached_property
    def walk_rates(self) -> F64:
        """Expected tokens per second along the walk [1 + drafts that fit]."""
        return rates(self.falling, self.weight, self.step_s_B, self.base)


class BudgetPolicy(Protocol):
    """Chooses how many drafts of each block to verify. One object serves one lane."""

    name: str
    """As the configuration spells it."""
    weighs: bool
    """Whether lengths follow the survival values. Only then does verifying a block whole now and
    then, to learn what it is worth, change anything."""

    def lengths(self, step: PolicyInput) -> I32:
        """Drafts to verify per request [R], within what is in hand and what fits.

        Raises:
            Unsupported: this policy would be biased for this step.
        """
        ...

    def remember(self, step: PolicyInput) -> None:
        """Keep what later steps may look at. Called once for every step whose lengths were asked
        for, in that order."""
        ...
