"""What an offline run reports, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Round:
    """One verify row and what became of it. Position k of a block is counted from 0."""

    prompt: int
    """Index into the prompts handed in."""
    source: str
    domain: str
    regime: str
    """``greedy``, ``coupled`` or ``rejection``; greedy is temperature 0 in either mode."""
    anchor: int
    """Position of the anchor, which is the context depth."""
    draft_ids: tuple[int, ...]
    """The whole block, empty for a plain round."""
    confidence: tuple[float, ...]
    """Conditional, as the drafter reported them, one for each of ``draft_ids``."""
    num_verified: int
    """Drafts handed to the target: all but near the request's end."""
    num_accepted: int
    reached: int
    """Leading positions whose outcome is known: those accepted and the first one refused. What a
    stop id cut off is not among them, nor what was not verified."""
    num_emitted: int
    """Tokens of this round, the bonus included: its accepted length."""
    draft_batch: int
    """Blocks drafted in the same batch, 0 for a plain round."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A request that has ended."""

    prompt: int
    token_ids: tuple[int, ...]
    """Everything emitted: the token that ends the prefill, then those of the rounds."""
    finish: str
    """``stop`` or ``length``."""
