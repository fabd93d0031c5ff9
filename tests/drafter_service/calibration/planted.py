"""Rounds whose law is known: a head that is off by a planted temperature and offset."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from drafter_service.calibration.samples import Samples, sigmoid

ROUNDS_PER_PROMPT = 20


def planted(
    num: int,
    temperatures: Sequence[float],
    offsets: Sequence[float] | None = None,
    *,
    ceiling: float = 1.0,
    seed: int,
) -> Samples:
    """``num`` rounds in which c_k = sigmoid(logit / T_k + b_k) holds exactly; blocks of easy
    contexts are easy at every position.

    Args:
        ceiling: share of the drafts that can hold at all, whatever the head says.
    """
    rng = np.random.default_rng(seed)
    gamma = len(temperatures)
    true = 0.8 + rng.normal(0, 1, (num, 1)) + rng.normal(0, 1, (num, gamma))
    shift = np.zeros(gamma) if offsets is None else np.array(offsets)
    accepted = rng.random((num, gamma)) < ceiling * sigmoid(true)
    return Samples(
        logit=(true - shift) * np.array(temperatures),
        num_accepted=accepted.cumprod(axis=1).sum(axis=1),
        num_observable=np.full(num, gamma),
        prompt=np.arange(num) // ROUNDS_PER_PROMPT,
    )
