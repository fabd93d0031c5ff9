"""A request and its life inside the router, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.wire import Sampling


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """A tokenized, validated request, as ingress hands it to placement."""

    request_id: str
    ids: tuple[int, ...]
    sampling: Sampling
    max_new_tokens: int
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    draft: bool = True
    """False: decode plainly (the baseline of every comparison)."""
    deadline_s: float | None = None
    """Seconds from submission after which the request ends with DeadlineExceeded."""
    target_rate: float = 0.0
    """New tokens per second that it should get, 0 for no target."""
    tier: str = ""
    """How much it counts beside others, a name of `cluster.tiers`; empty for the usual one."""
    constraint_kind: str = ""
    """What binds the answer's form, one of `cluster.constraints.KINDS`; empty for nothing."""
    constraint: str = ""
    """The constraint's text."""
    adapter: str = ""
    """Name of the target's LoRA adapter; empty for the target as it is."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a request cost, counted over what was emitted (nothing past a stop)."""

    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_rounds: int = 0
    """Verify steps that emitted for this request, the prefill's first token not counted."""
    num_proposed: int = 0
    """Draft tokens that drafters sent."""
    num_verified: int = 0
    """Draft tokens that the scheduler admitted to verification."""
    num_accepted: int = 0


@dataclass(frozen=True, kw_only=True)
class Delta:
    """One event of a stream: new text and ids of one round; the last one has ``finish_reason``."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: str = ""
    """Empty while running; ``stop``, ``length`` or ``cancelled`` at the end."""
    usage: Usage = field(default_factory=Usage)
    """Totals so far."""
