"""Tiers and costs of a profile at one moment, as predictions read them. Pure."""

from __future__ import annotations

import bisect
from typing import Final

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

_LEAST_SHARE: Final = 0.05
"""No step is predicted to take less than this share of the smallest tier."""


class StepCurve:
    """Lines between the tiers, made for fast reading.

    Args:
        tokens: [K] sizes.
        tiers_s: [K] seconds, never falling.
        costs: of a row, a position of context, a pair, a prompt token.
    """

    __slots__ = ("_beyond", "_grid", "_tiers", "_token_list", "_tokens", "costs", "values")

    def __init__(self, tokens: F64, tiers_s: F64, costs: list[float]) -> None:
        self.costs = costs
        self.values: list[float] = tiers_s.tolist()
        self._tokens = tokens
        self._token_list: list[float] = tokens.tolist()
        self._tiers = tiers_s
        # Past the last point the line through the first and last one goes on.
        width = self._token_list[-1] - self._token_list[0]
        self._beyond = (self.values[-1] - self.values[0]) / width if width else 0.0
        self._grid = np.zeros(0)

    @property
    def least_s(self) -> float:
        """No step takes less."""
        return _LEAST_SHARE * self.values[0]

    def tier_s(self, num_tokens: int) -> float:
        """Seconds of the tier of so many tokens."""
        tokens, values = self._token_list, self.values
        if num_tokens <= tokens[0]:
            return values[0]
        if num_tokens >= tokens[-1]:
            return values[-1] + (num_tokens - tokens[-1]) * self._beyond
        upper = bisect.bisect_left(tokens, num_tokens)
        low, low_s = tokens[upper - 1], values[upper - 1]
        return low_s + (num_tokens - low) / (tokens[upper] - low) * (values[upper] - low_s)

    def tiers_s(self, max_tokens: int) -> F64:
        """Seconds [max_tokens + 1] of the tiers of 0..max_tokens tokens."""
        if len(self._grid) <= max_tokens:
            sizes = np.arange(max_tokens + 1, dtype=np.float64)
            self._grid = np.interp(sizes, self._tokens, self._tiers)
            last = int(self._token_list[-1])
            if max_tokens > last:
                self._grid[last:] += (sizes[last:] - last) * self._beyond
        return self._grid[: max_tokens + 1]
