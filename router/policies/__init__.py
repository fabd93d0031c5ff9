"""Budget policies: how many drafts of each block a step verifies (paper section 3.2.2, DESIGN 5).

`make_policy` makes one from its name in the configuration. All are pure: survival values and step
times in, lengths out, memory of earlier steps their only state.
"""

from router.policies.naming import make_policy
from router.policies.policy import BudgetPolicy, PolicyInput

__all__ = ["BudgetPolicy", "PolicyInput", "make_policy"]
