"""``adaptive``: whole blocks below the knee, above it the best cut that is exact for the step."""

from __future__ import annotations

from router.policies.knee import Knee
from router.policies.lagged import Lagged
from router.policies.policy import PolicyInput
from router.policies.retrospective import retrospective_lengths
from router.policies.walk import I32, level


class Adaptive:
    """The default policy.

    Whole blocks where cutting them has gained less than the minimum of late: one plain path for
    all rows, without a decision that could lose anything. Else the retrospective optimum if no
    draft of the step was drawn, and the lagged budget if one was.

    Exact in rejection mode: whether to cut is decided by earlier steps, two back as in `Lagged`.

    Args:
        min_gain: share of tokens per second.
    """

    name = "adaptive"
    weighs = True

    def __init__(self, min_gain: float) -> None:
        self._knee = Knee(min_gain)
        self._lagged = Lagged()
        self._latest: PolicyInput | None = None

    def lengths(self, step: PolicyInput) -> I32:
        """See the class."""
        whole_fits = int(step.num_drafts_R.sum()) <= step.room
        if whole_fits and not self._knee.cuts(step):
            return level(step.num_drafts_R, step.room)
        if step.deterministic_R.all():
            return retrospective_lengths(step)
        return self._lagged.lengths(step)

    def remember(self, step: PolicyInput) -> None:
        """The step before this one can be looked at from now on."""
        self._lagged.remember(step)
        if self._latest is not None:
            self._knee.learn(self._latest)
        self._latest = step
