"""What shapes the distribution of a request's tokens; goes wherever the request goes."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.wire.fields import F32, I32, Record, array, natural, string
from cluster.wire.limits import MAX_BIASES, MAX_TOP_K

# ruff: noqa: RUF009 - `array` and `column` make dataclass fields


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampling(Record):
    """Everything that shapes the distribution of one request's tokens."""

    temperature: float
    """0 is greedy."""
    top_k: int = natural(MAX_TOP_K)
    """0 means all."""
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias_ids: I32 = array("i4", limit=MAX_BIASES, rows="bias")
    bias_values: F32 = array("f4", limit=MAX_BIASES, rows="bias")
    seed: int = natural((1 << 64) - 1)
    mode: str = string(16)
    """``coupled`` or ``rejection`` (see DESIGN, two exact acceptance modes)."""
    logprobs: bool
