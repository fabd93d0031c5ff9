"""Samples made by hand."""

from __future__ import annotations

from cluster.prompt_file import TextPrompt
from dspark.bench.asks import Ask
from dspark.bench.sample import Sample
from dspark.messages import Usage


def make_prompt(text: str = "Hi", *, domain: str = "chat") -> TextPrompt:
    return TextPrompt(text=text, source="made", domain=domain, where="here")


def make_usage(completion_tokens: int, rounds: int, verified: int = 0) -> Usage:
    return Usage(
        prompt_tokens=5,
        completion_tokens=completion_tokens,
        rounds=rounds,
        proposed=7 * rounds,
        verified=verified,
        accepted=completion_tokens - 1 - rounds,
        ttft_s=0.1,
        total_s=1.0,
        seed=0,
    )


def make_sample(
    chunks: list[tuple[float, int]],
    *,
    scheduled_s: float = 0.0,
    ended_s: float | None = None,
    usage: Usage | None = None,
    error: str = "",
    domain: str = "chat",
    target: float | None = None,
) -> Sample:
    """A sample whose messages came at these times with so many tokens."""
    ask = Ask(
        prompt=make_prompt(domain=domain),
        temperature=0.0,
        mode="coupled",
        max_tokens=64,
        seed=0,
        draft=True,
        target_tokens_per_s=target,
        tier="",
        adapter="",
        json_schema="",
    )
    return Sample(
        ask=ask,
        scheduled_s=scheduled_s,
        sent_s=scheduled_s,
        chunk_s=[at for at, _ in chunks],
        chunk_tokens=[tokens for _, tokens in chunks],
        ended_s=ended_s,
        usage=usage,
        error=error,
    )
