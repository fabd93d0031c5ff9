"""When a draft gate decides anew, and how a lane begins at a load it has not met. Pure."""

from __future__ import annotations

import math
from collections import Counter
from typing import Final

_PERIOD_S: Final = 0.02
_ROWS_PER_ROUND: Final = 16
_MOST_ROUNDS: Final = 4
"""A decision holds, on average, for a round for each so many rows, and for so many seconds."""
_FIRST_ROUNDS: Final = 5
"""Rounds that a lane drafts in at a load it has not met, by powers of two."""
_GOLDEN: Final = (math.sqrt(5) - 1) / 2


class GateRhythm:
    """Counts rounds.

    With many rows there is much to learn from and a decision takes its time; with short rounds it
    takes a noticeable part of them. So some rounds go on as the one before. Which ones is spread
    such that no group of rows that take turns always meets them.
    """

    def __init__(self) -> None:
        self.num_since = 0
        """Rounds since the last decision."""
        self.round_s = _PERIOD_S
        """Of a plain round, as far as is known."""
        self._num_rounds = 0
        self._order = -1
        self._met: Counter[int] = Counter()
        """Drafted first rounds by binary order of the number of rows."""

    def tick(self, num_rows: int) -> bool:
        """A round of so many rows begins: whether to decide anew."""
        self._num_rounds += 1
        self.num_since += 1
        order = num_rows.bit_length()
        if order != self._order or self.is_new(num_rows):
            self._order = order
            return True
        held = max(_PERIOD_S / self.round_s, num_rows / _ROWS_PER_ROUND)
        return self._num_rounds * _GOLDEN % 1.0 * min(held, _MOST_ROUNDS) < 1

    def is_new(self, num_rows: int) -> bool:
        """Whether this load, within a factor of two, was hardly met yet."""
        return self._met[num_rows.bit_length()] < _FIRST_ROUNDS

    def begin(self, num_rows: int) -> bool:
        """A round to learn from at such a load: whether it is the turn of a contrary one, of which
        there are a few for comparison."""
        self._met[num_rows.bit_length()] += 1
        return self._met[num_rows.bit_length()] % _FIRST_ROUNDS == 0
