"""``causal``: Algorithm 1 of the paper (section 3.2.2), with its early stop."""

from __future__ import annotations

from router.policies.policy import PolicyInput
from router.policies.walk import I32, admit


def causal_lengths(step: PolicyInput) -> I32:
    """Admit drafts in walk order for as long as each one raises expected tokens per second.

    Exact in rejection mode: a draft's place in the walk and its admission depend on the survival of
    the drafts before it and on its own, and that is a function of tokens admitted before. Nothing
    behind the first draft that does not pay is looked at. The price of that is a local optimum: a
    cliff of the step times is never crossed.
    """
    rate_N = step.walk_rates
    pays = rate_N[1:] > rate_N[:-1]  # so far each one paid, hence the last is also the best
    num = len(pays) if pays.all() else int(pays.argmin())
    return admit(step.gains, step.falling, num)


class Causal:
    """The policy. It remembers nothing."""

    name = "causal"
    weighs = True

    def lengths(self, step: PolicyInput) -> I32:
        """See `causal_lengths`."""
        return causal_lengths(step)

    def remember(self, step: PolicyInput) -> None:
        """Nothing is kept."""
