"""A policy from its name in the configuration."""

from __future__ import annotations

from collections.abc import Callable

from cluster.config import SchedulingConfig
from cluster.policy_text import read_policy
from router.policies.adaptive import Adaptive
from router.policies.causal import Causal
from router.policies.fixed import Fixed, Threshold
from router.policies.lagged import Lagged
from router.policies.policy import BudgetPolicy
from router.policies.retrospective import Retrospective


def make_policy(text: str, *, min_gain: float = SchedulingConfig.min_gain) -> BudgetPolicy:
    """A policy that has seen nothing yet.

    Args:
        text: see `cluster.policy_text`.
        min_gain: least gain for which ``adaptive`` cuts blocks; the others do not ask.

    Raises:
        ConfigError: no such policy.
    """
    name, argument = read_policy(text)
    makers: dict[str, Callable[[], BudgetPolicy]] = {
        "adaptive": lambda: Adaptive(min_gain),
        "causal": Causal,
        "lagged": Lagged,
        "retrospective": Retrospective,
        "fixed": lambda: Fixed(text, int(argument)),
        "threshold": lambda: Threshold(text, argument),
        "full": lambda: Fixed(text, None),
        "none": lambda: Fixed(text, 0),
    }
    return makers[name]()
