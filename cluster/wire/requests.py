"""Frames between routers: a request that is lent, and its output on the way back."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.wire.fields import F32, I32, Frame, array, items, natural, string
from cluster.wire.limits import MAX_CONSTRAINT_CHARS, MAX_FRAME_BYTES, MAX_PROMPT_TOKENS
from cluster.wire.sampling import Sampling

# ruff: noqa: RUF009 - `array` and `column` make dataclass fields


@dataclass(frozen=True, kw_only=True, eq=False)
class Submit(Frame):
    """Hand a tokenized request to the router that owns a better lane."""

    request_id: str = string()
    loan: int = natural()
    """Over 0 and new with each `Submit` of a stream, request ids may come again; every `Emit` of
    the request repeats it."""
    ids: I32 = array("i4", limit=MAX_PROMPT_TOKENS)
    """The prompt, then tokens already emitted when a request continues after a fault."""
    num_prompt: int = natural(MAX_PROMPT_TOKENS)
    num_sent_chars: int = natural()
    """Characters of text that the client already has (0 for a fresh request)."""
    max_new_tokens: int = natural(MAX_PROMPT_TOKENS)
    """Counted from the prompt's end."""
    stop_ids: I32 = array("i4", limit=1024)
    stop_strings: tuple[str, ...] = items(64)
    ignore_eos: bool
    draft: bool
    sampling: Sampling
    deadline_s: float
    """Seconds left, 0 for none."""
    target_rate: float
    """Tokens per second that it should get, 0 for no target."""
    tier: str = string(64)
    """A name of `cluster.tiers`; empty for the usual one."""
    constraint_kind: str = string(16)
    """As `Admission`'s, and so are the next two."""
    constraint: str = string(MAX_CONSTRAINT_CHARS)
    adapter: str = string(128)


@dataclass(frozen=True, kw_only=True, eq=False)
class Emit(Frame):
    """One round's output of a submitted request. Exactly one has ``finish`` or ``error`` set."""

    request_id: str = string()
    loan: int = natural()
    """Of the `Submit`; 0 in answer to a `Cancel` of a request that was not submitted here."""
    seq: int = natural()
    """0, 1, 2, ...: a gap or a repeat is a fault of ours."""
    text: str = string(MAX_FRAME_BYTES)
    token_ids: I32 = array("i4")
    logprobs: F32 = array("f4")
    finish: str = string(32)
    """Empty while running; then ``stop``, ``length``, ``cancelled`` or ``error``."""
    error_code: str = string()
    error_message: str = string(4096)
    num_rounds: int = natural()
    num_proposed: int = natural()
    num_verified: int = natural()
    num_accepted: int = natural()


@dataclass(frozen=True, kw_only=True, eq=False)
class Cancel(Frame):
    """Stop a submitted request; answered by its terminal `Emit`."""

    request_id: str = string()
