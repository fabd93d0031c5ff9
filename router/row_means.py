"""What a row costs and gives on average, from the rounds of a lane so far. Pure.

Decisions about a round that has not been drafted yet, or whose blocks must not be looked at (DESIGN
section 5), go by these.
"""

from __future__ import annotations

from typing import Final

_FORGET: Final = 0.05
"""Weight of the newest step."""
_FIRST_TOKENS: Final = 4.0
_FIRST_EMITTED: Final = 2.0


class RowMeans:
    """Running means over the verify rows of drafting requests, whether their block came or not."""

    def __init__(self) -> None:
        self.num_tokens = _FIRST_TOKENS
        """Of a row: the anchor and its drafts."""
        self.num_emitted = _FIRST_EMITTED
        """Of a row: accepted drafts and the bonus token."""
        self._num_steps = 0

    def learn(self, num_rows: int, num_tokens: int, num_emitted: int) -> None:
        """Take in the drafting rows of one step; none say nothing."""
        if num_rows == 0:
            return
        self._num_steps += 1
        gain = max(_FORGET, 1 / (1 + self._num_steps))
        self.num_tokens += gain * (num_tokens / num_rows - self.num_tokens)
        self.num_emitted += gain * (max(num_emitted / num_rows, 1.0) - self.num_emitted)
