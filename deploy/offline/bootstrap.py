"""Confidence intervals by resampling prompts: rounds of one prompt resemble each other."""

from __future__ import annotations

from typing import Final

import numpy as np

from deploy.offline.round_table import F64, I64

NUM_RESAMPLES: Final = 1000
_LEVEL: Final = 0.95
_SEED: Final = 20260705

Interval = tuple[float, float] | tuple[None, None]
"""Low and high end; none where a single prompt tells nothing of how others would do."""


def interval_of_ratio(
    numerator_N: F64 | I64, denominator_N: F64 | I64, prompt_N: I64, *, seed: int = _SEED
) -> Interval:
    """95% interval of sum(numerator) / sum(denominator) over rounds N (percentile method).

    Args:
        prompt_N: prompt of each round; whole prompts are drawn with replacement.

    Raises:
        ValueError: no rounds.
    """
    if not len(prompt_N):
        raise ValueError("no rounds")
    numerator_P, denominator_P = _per_prompt(prompt_N, numerator_N, denominator_N)
    if len(numerator_P) == 1:
        return None, None
    weight_BP = _weights(len(numerator_P), seed)
    below_B = weight_BP @ denominator_P
    drawn = below_B > 0  # a denominator may be zero for some prompts, and so for all that are drawn
    return _percentiles((weight_BP @ numerator_P)[drawn] / below_B[drawn])


def interval_of_quotient(
    ours: tuple[I64, I64], theirs: tuple[I64, I64], *, seed: int = _SEED
) -> Interval:
    """95% interval of our mean over theirs, on the same prompts, drawn together.

    Args:
        ours: tokens and rounds per prompt, [P] each.
        theirs: likewise, prompt by prompt.
    """
    if len(ours[0]) == 1:
        return None, None
    weight_BP = _weights(len(ours[0]), seed)
    return _percentiles(_means(weight_BP, *ours) / _means(weight_BP, *theirs))


def _means(weight_BP: F64, tokens_P: I64, rounds_P: I64) -> F64:
    mean_B: F64 = (weight_BP @ tokens_P) / (weight_BP @ rounds_P)
    return mean_B


def _per_prompt(prompt_N: I64, *values: F64 | I64) -> tuple[F64, ...]:
    _, place_N = np.unique(prompt_N, return_inverse=True)
    return tuple(np.bincount(place_N, value_N).astype(np.float64) for value_N in values)


def _weights(num_prompts: int, seed: int) -> F64:
    """[resamples, prompts]: how often each prompt is drawn."""
    generator = np.random.default_rng(seed)
    even = np.full(num_prompts, 1 / num_prompts)
    return generator.multinomial(num_prompts, even, size=NUM_RESAMPLES).astype(np.float64)


def _percentiles(value_B: F64) -> Interval:
    tail = (1 - _LEVEL) / 2
    low, high = np.quantile(value_B, [tail, 1 - tail])
    return float(low), float(high)
