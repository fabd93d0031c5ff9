"""Time to the first token: the queue, the running step, other prompts, the prompt's own chunks.

Shape legend: M moments and prompts that a request may have, equally likely; n states of a pool.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from deploy.simulation.rates_pair import PairSpec
from deploy.simulation.rates_round import Round
from deploy.simulation.rates_steps import square_ratio

F64 = NDArray[np.float64]

_MOMENTS: Final = 64
_MOST_FULL: Final = 0.98
"""Share of the prefill budget that is taken for full: beyond, waiting only grows."""


class Prefill:
    """From a place in a lane to the first token, by the lane's steady round.

    A request waits for the rest of the running step, which comes at any moment of it; then for the
    prompts before its own (mean of a queue with random arrivals and general service, exponential as
    such waits are when they matter); then for the steps that its own chunks take.
    """

    def __init__(self, pair: PairSpec) -> None:
        self._prompt = pair.lengths.prompt
        self._hops_s = 2 * pair.hop_s
        rng = np.random.default_rng(0)
        even = (np.arange(_MOMENTS) + 0.5) / _MOMENTS
        self._moment_M = even
        self._queue_M = -np.log1p(-rng.permutation(even))
        """Of mean 1."""
        prompts = sorted(self._prompt.draw(rng) for _ in range(32 * _MOMENTS))
        mean_M = np.array(prompts, np.float64).reshape(_MOMENTS, -1).mean(axis=1)
        self._prompt_M: F64 = rng.permutation(mean_M)

    def columns(self, one: Round) -> tuple[float, float, float, float]:
        """Of a round, what `waits` needs: seconds of a running step that one meets, of the mean
        queue, of a step with a chunk; and prompt tokens of such a step."""
        turn_s = one.chunk_s + self._hops_s
        full = min(one.prefill_tokens / one.most_chunk, _MOST_FULL)
        served_s = self._prompt.mean / one.most_chunk * turn_s
        queue_s = full / (1 - full) / 2 * square_ratio(self._prompt) * served_s
        return one.verifier_busy * one.step_s, queue_s, turn_s, float(one.most_chunk)

    def waits(self, busy_s_n: F64, queue_s_n: F64, turn_s_n: F64, chunk_n: F64) -> F64:
        """Times [n, M] of all kinds of requests."""
        turns_nM = np.maximum(np.ceil(self._prompt_M / chunk_n[:, None]), 1.0)
        waits: F64 = (
            busy_s_n[:, None] * self._moment_M
            + queue_s_n[:, None] * self._queue_M
            + turn_s_n[:, None] * turns_nM
        )
        return waits
