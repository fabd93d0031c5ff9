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
