"""Service levels: what a token of each request is worth to the scheduler, and how many got theirs.

A request may carry a target rate (new tokens per second) and a tier (`cluster.tiers`). The budget
policies multiply its survival values by a weight: when verification is scarce, the drafts of
requests that lag behind their target go before equal drafts of others. Where it is not, everyone's
are verified and weights do nothing.

Exactness: a weight is a function of the tier and of what earlier rounds emitted and when, never of
the block at hand, so in rejection mode it may decide (DESIGN section 5). `Progress` is written when
a result is applied and read when a later step is formed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from cluster.tiers import tier_weight
from router.lane_request import LaneRequest
from router.policies.walk import F64
from router.progress import Progress

MAX_URGENCY: Final = 4.0
"""A request's weight is its tier's times at most this, or a fourth part of it at least: none ever
starves another."""

_SLACK_TOKENS: Final = 8.0
"""Added on both sides of the comparison, so that the first tokens do not swing it."""
_SHARPNESS: Final = 2.0
_KEPT: Final = 1024


def weights(rows: Sequence[LaneRequest]) -> F64:
    """Weight [R] of a token of each request in the step that goes now."""
    weight_R = np.ones(len(rows))
    for r, request in enumerate(rows):
        if request.tier or request.target_rate:
            urgent = urgency(request.target_rate, request.progress)
            weight_R[r] = tier_weight(request.tier) * urgent
    return weight_R


def urgency(target_rate: float, progress: Progress) -> float:
    """How much more a token is worth because the request lags, or less because it leads: the square
    of tokens due over tokens emitted, within `MAX_URGENCY` and its inverse; 1 without a target."""
    if not target_rate:
        return 1.0
    due = target_rate * progress.elapsed_s + _SLACK_TOKENS
    behind: float = (due / (progress.num_tokens + _SLACK_TOKENS)) ** _SHARPNESS
    return min(max(behind, 1 / MAX_URGENCY), MAX_URGENCY)


class Attainment:
    """Requests with a target that have ended: how many got it, and how far the worst fell short."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_met = 0
        self._ratios: deque[float] = deque(maxlen=_KEPT)
        """Rate over target of the latest ones."""

    def add(self, target_rate: float, progress: Progress) -> None:
        """A request has ended. Without a target, or without two tokens at different times, it has
        no rate to compare."""
        rate = progress.rate
        if not target_rate or rate is None:
            return
        ratio = rate / target_rate
        self.num_requests += 1
        self.num_met += ratio >= 1.0
        self._ratios.append(ratio)

    def figures(self) -> dict[str, float]:
        """Totals since start; ``share_met`` and the 5th and 50th percentile of rate over target are
        of the latest requests, and there once there is one."""
        figures = {"num_requests": float(self.num_requests), "num_met": float(self.num_met)}
        if self._ratios:
            ratios = np.array(self._ratios)
            figures["share_met"] = float((ratios >= 1.0).mean())
            figures["ratio_p5"], figures["ratio_p50"] = np.quantile(ratios, [0.05, 0.5]).tolist()
        return figures
