"""What makes a verify step take its time, as one plain record."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepLoad:
    """The size of one step, planned or executed (DESIGN section 6)."""

    num_rows: int
    """Requests with a verify row."""
    num_tokens: int
    """Tokens that the target computes: anchors, drafts and prompt chunks. Of an executed step:
    with padding, for that is what ran."""
    num_prefill: int = 0
    """Those of them that belong to prompt chunks."""
    sum_context: int = 0
    """Positions that the step attends to, over rows and prompt chunks."""
    num_pairs: int = 0
    """Pairs of a token and a position that it attends to; 0: not known, taken from the mean."""

    @property
    def mean_context(self) -> float:
        """Positions behind a row, or a prompt chunk, of which there is mostly one."""
        num_spans = self.num_rows + (self.num_prefill > 0)
        return self.sum_context / num_spans if num_spans else 0.0

    @property
    def pairs(self) -> float:
        """``num_pairs``, or its estimate."""
        return float(self.num_pairs) or self.mean_context * self.num_tokens
