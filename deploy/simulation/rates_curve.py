"""Step times of a lane whose rows all have the mean context: quick to look up. Pure."""

from __future__ import annotations

import numpy as np

from deploy.simulation.curves import StepCurve


class CountedCurve:
    """A step curve at a fixed context.

    Args:
        mean_context: positions behind a row.
        prompt_context: positions behind a prompt chunk, on average.
        most: tokens of a step.
    """

    def __init__(
        self, curve: StepCurve, *, mean_context: float, prompt_context: float, most: int
    ) -> None:
        self._curve = curve
        self._mean_context = mean_context
        self._prompt_context = prompt_context
        self._tokens: list[float] = curve.of_tokens(np.arange(most + 1, dtype=np.float64)).tolist()
        self._beside = any((curve.per_context_s, curve.per_pair_s, curve.per_prefill_s))

    def step_s(self, num_rows: int, num_verify: int, num_prefill: int) -> float:
        """Seconds of a step.

        Args:
            num_verify: tokens of the verify rows, drafts included.
        """
        num_tokens = min(num_verify + num_prefill, len(self._tokens) - 1)
        seconds = self._tokens[num_tokens] + self._curve.per_row_s * num_rows
        if self._beside:
            seconds += self._beside_s(num_rows, num_verify, num_prefill)
        return seconds

    def _beside_s(self, num_rows: int, num_verify: int, num_prefill: int) -> float:
        curve, pairs = self._curve, num_verify * self._mean_context
        context = num_rows * self._mean_context
        if num_prefill:
            context += self._prompt_context
            pairs += num_prefill * self._prompt_context
        return (
            curve.per_context_s * context
            + curve.per_pair_s * pairs
            + curve.per_prefill_s * num_prefill
        )
