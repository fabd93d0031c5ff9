"""``lagged``: a budget from earlier rounds, filled by this step's survival values (paper 5.2)."""

from __future__ import annotations

import numpy as np

from router.policies.memory import SurvivalMemory
from router.policies.policy import PolicyInput
from router.policies.walk import F64, I32, falling, first, rates


class Lagged:
    """Budget: global argmax over what the same requests' earlier blocks survived with. Then so many
    drafts in the order of this step's walk.

    Exact in rejection mode: the budget is fixed before the blocks are looked at, and the walk
    admits a draft by what was admitted before it. Unlike the early stop, the argmax steps over the
    cliffs of the step times.

    A step looks two steps back (paper section 5.2): with one step queued ahead at the verifier, the
    one before may be running still, its drafts drawn but not judged.
    """

    name = "lagged"
    weighs = True

    def __init__(self) -> None:
        self._memory = SurvivalMemory()
        self._latest: PolicyInput | None = None

    def predicted(self, step: PolicyInput) -> F64:
        """Tokens per second after 0, 1, ... drafts, going by the earlier rounds of the step's
        requests; no survival value of the step itself is read."""
        expected_RG = self._memory.expected(step)
        expected_RG *= step.weight_R.astype(np.float32)[:, None]
        return rates(falling(expected_RG), step.weight, step.step_s_B, step.base)

    def lengths(self, step: PolicyInput) -> I32:
        """The best budget, filled in walk order; drafts without a chance are left out of it."""
        return first(step.gains, int(self.predicted(step).argmax()))

    def remember(self, step: PolicyInput) -> None:
        """The step before this one can be looked at from now on."""
        if self._latest is not None:
            self._memory.put(self._latest)
        self._latest = step
