"""Policies that do not weigh cost against gain: baselines to compare with."""

from __future__ import annotations

import numpy as np

from router.policies.policy import PolicyInput
from router.policies.walk import I32, level


class Fixed:
    """So many drafts of every block, or as many as it has; survival plays no part.

    Args:
        name: as the configuration spells it.
        most: drafts; None for the whole block.
    """

    weighs = False

    def __init__(self, name: str, most: int | None) -> None:
        self.name = name
        self._most = most

    def lengths(self, step: PolicyInput) -> I32:
        """Where they do not all fit, every row's next draft goes before any row's next but one."""
        wanted_R = step.num_drafts_R
        if self._most is not None:
            wanted_R = np.minimum(wanted_R, self._most)
        return level(wanted_R, step.room)

    def remember(self, step: PolicyInput) -> None:
        """Nothing is kept."""


class Threshold:
    """Each block up to its first draft of a conditional confidence below a threshold.

    Exact in rejection mode: a draft's own confidence depends on the tokens before it, and those
    have been admitted; where drafts do not all fit, rows take turns in one common order.

    Args:
        name: as the configuration spells it.
        least: confidence, in [0, 1].
    """

    weighs = True

    def __init__(self, name: str, least: float) -> None:
        self.name = name
        self._least = least

    def lengths(self, step: PolicyInput) -> I32:
        """Drafts before the first doubtful one, as far as they fit."""
        survival_RG = step.survival_RG
        before_RG = np.ones_like(survival_RG)
        before_RG[:, 1:] = survival_RG[:, :-1]
        # a_j = fl(a_{j-1} c_j), so a confidence of just the threshold passes in spite of rounding.
        passes_RG = survival_RG >= self._least * before_RG
        passes_RG &= np.arange(survival_RG.shape[1]) < step.num_drafts_R[:, None]
        passed_R = np.logical_and.accumulate(passes_RG, axis=1).sum(axis=1)
        return level(passed_R, step.room)

    def remember(self, step: PolicyInput) -> None:
        """Nothing is kept."""
