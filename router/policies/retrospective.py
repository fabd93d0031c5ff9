"""``retrospective``: the best point of the whole walk over the step's own survival values."""

from __future__ import annotations

from cluster.errors import Unsupported
from router.policies.policy import PolicyInput
from router.policies.walk import I32, admit


def retrospective_lengths(step: PolicyInput) -> I32:
    """Maximise expected tokens per second over every start of the walk; the shortest of equals.

    Exact only where no draft was drawn: greedy, one-hot and coupled drafts are functions of context
    and seed, and so is what is emitted, however much of them is verified. A drawn draft would be
    looked at before it is decided about (paper, Appendix A: 0.85 in place of 0.7).

    Raises:
        Unsupported: the step holds a sampled draft of a rejection-mode request.
    """
    if not step.deterministic_R.all():
        num = int((~step.deterministic_R).sum())
        raise Unsupported(
            f"the retrospective policy would be biased by {num} blocks of sampled drafts",
            hint="use adaptive, lagged or causal, or coupled mode for all requests",
        )
    return admit(step.gains, step.falling, int(step.walk_rates.argmax()))


class Retrospective:
    """The policy. It remembers nothing."""

    name = "retrospective"
    weighs = True

    def lengths(self, step: PolicyInput) -> I32:
        """See `retrospective_lengths`."""
        return retrospective_lengths(step)

    def remember(self, step: PolicyInput) -> None:
        """Nothing is kept."""
