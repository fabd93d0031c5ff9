"""Chance with little noise in its sums, for means over short plays. Pure.

Draws come in hands: one from every one of equally likely strata, in random order. Each draw by
itself is as random as any other, so prompts meet in steps as they do; a hand as a whole is level.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

import numpy as np

from deploy.simulation.traces import LengthSpec

_HAND: Final = 64
_FEW: Final = 16
"""A hand of lengths: there are fewer prompts than steps."""


class Draws:
    """Uniform numbers of (0, 1), level within every hand.

    Args:
        size: of a hand.
    """

    def __init__(self, rng: np.random.Generator, *, size: int = _HAND) -> None:
        self._rng = rng
        self._size = size
        self._hand: list[float] = []

    def uniform(self) -> float:
        """The next one."""
        if not self._hand:
            strata = self._rng.permutation(self._size)
            self._hand = ((strata + self._rng.random(self._size)) / self._size).tolist()
        return self._hand.pop()

    def poisson(self, mean: float) -> int:
        """How often something rare happens that happens so often on average."""
        left, num, share = self.uniform(), 0, math.exp(-mean)
        while left > share and num < _HAND:
            left -= share
            num += 1
            share *= mean / num
        return num


class Lengths:
    """Lengths of a law, level within every hand."""

    def __init__(self, law: LengthSpec, rng: np.random.Generator) -> None:
        self._draws = Draws(rng, size=_FEW)
        self._lengths = _levels(law)

    def next(self) -> int:
        """One length."""
        return self._lengths[min(int(self._draws.uniform() * _HAND), _HAND - 1)]


@lru_cache(maxsize=64)
def _levels(law: LengthSpec) -> list[int]:
    """Means of equally likely parts of the law."""
    rng = np.random.default_rng(0)
    drawn = sorted(law.draw(rng) for _ in range(_HAND * _HAND))
    middles = np.array(drawn, np.float64).reshape(_HAND, _HAND).mean(axis=1)
    # A sample's mean is off by its chance; what counts here is the mean.
    scaled = middles * law.mean / middles.mean()
    levels: list[int] = np.maximum(scaled.round(), 1).astype(np.int64).tolist()
    return levels
