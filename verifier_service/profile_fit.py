"""From timed steps to a table: the staircase over tokens, and the costs beside it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.isotonic import isotonic
from cluster.profile_snapshot import StepRecord
from cluster.step_costs import StepCosts

F64 = NDArray[np.float64]

_USUAL: Final = (8.0, 4000.0, 16000.0, 64.0)
"""Rows, context, pairs and prompt tokens of a step of everyday."""
_PULL: Final = 0.02
"""Weight, against one sample's, of the belief that a cost of a usual step is no more than a small
step takes: what no shape tells is 0, what one does is hardly moved."""
_LEAST_SHARE: Final = 0.1
"""A tier is at least this share of what was measured at its size."""


def fit(samples: Sequence[StepRecord]) -> tuple[tuple[int, ...], tuple[float, ...], StepCosts]:
    """Tiers and costs that explain the samples best, in relative least squares.

    Every size that was measured in some shape is a tier of its own; costs that would be negative
    are none. Tiers are made never to fall by pooling adjacent violators.

    Args:
        samples: at least one.

    Returns:
        Sizes, rising; seconds of each without the costs; the costs.
    """
    assert samples, "a table of no samples"
    sizes = sorted({sample.num_tokens for sample in samples})
    free = [0, 1, 2, 3]
    while True:
        tiers, found = _solve(samples, sizes, free)
        worst = min((cost for cost in free if cost != 3), key=lambda cost: found[cost], default=3)
        if worst == 3 or found[worst] >= 0:
            break
        free.remove(worst)
    # A prompt token cannot save more than nearly all that a token costs.
    per_token_s = (tiers[-1] - tiers[0]) / max(sizes[-1] - sizes[0], 1)
    costs = StepCosts(
        row_s=max(float(found[0]), 0.0),
        context_s=max(float(found[1]), 0.0),
        pair_s=max(float(found[2]), 0.0),
        prefill_s=max(float(found[3]), -0.9 * max(float(per_token_s), 0.0)),
    )
    measured = {size: min(s.step_s for s in samples if s.num_tokens == size) for size in sizes}
    positive = [
        max(float(tier), _LEAST_SHARE * measured[size])
        for size, tier in zip(sizes, tiers, strict=True)
    ]
    return tuple(sizes), isotonic(positive), costs


def _solve(
    samples: Sequence[StepRecord], sizes: Sequence[int], free: Sequence[int]
) -> tuple[F64, F64]:
    """Tiers and the four costs, those not ``free`` 0."""
    num_tiers, num_samples = len(sizes), len(samples)
    place = {size: index for index, size in enumerate(sizes)}
    left = np.zeros((num_samples + 4, num_tiers + 4))
    right = np.zeros(num_samples + 4)
    for row, sample in enumerate(samples):
        left[row, place[sample.num_tokens]] = 1.0
        left[row, num_tiers:] = (
            sample.num_rows, sample.sum_context, sample.num_pairs, sample.num_prefill,
        )  # fmt: skip
        left[row] /= sample.step_s
        right[row] = 1.0
    smallest_s = min(sample.step_s for sample in samples)
    for cost in range(4):
        left[num_samples + cost, num_tiers + cost] = _PULL * _USUAL[cost] / smallest_s
    held = [num_tiers + cost for cost in range(4) if cost not in free]
    left[:, held] = 0.0
    # Columns of one scale: seconds per pair are a millionth of seconds per row.
    scale = np.abs(left).max(axis=0)
    scale[scale == 0] = 1.0
    solution = np.linalg.lstsq(left / scale, right, rcond=None)[0] / scale
    return solution[:num_tiers], solution[num_tiers:]
