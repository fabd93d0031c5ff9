"""What a step costs beside its tokens, as verifiers measure it and routers predict with."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

from cluster.errors import FrameError


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Seconds that a step takes on top of what its number of tokens explains.

    Raises:
        FrameError: not finite, or negative where time cannot be.
    """

    row_s: float = 0.0
    """Per request (alpha)."""
    context_s: float = 0.0
    """Per position of context and request: reading its keys and values (beta)."""
    pair_s: float = 0.0
    """Per pair of a token and a position it attends to: what drafts and prompt chunks add to the
    reading, for they look at the same positions many times."""
    prefill_s: float = 0.0
    """Per prompt token, against one of a verify row. Mostly negative: it needs no logits."""

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, astuple(self))):
            raise FrameError(f"profile: costs that are no numbers: {self}")
        if min(self.row_s, self.context_s, self.pair_s) < 0:
            raise FrameError(f"profile: negative costs: {self}")
