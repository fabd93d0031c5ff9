"""The prefix scheduler: how many drafts of each block to verify (paper section 3.2.2, Algorithm 1).

Pure: survival and profile in, lengths out. Rejection mode is exact only because the rule never
looks past the first draft that does not pay (DESIGN section 5): a later survival value depends on
the token just drawn, and looking at it first would leak that token into its own admission.

Shape legend: R requests with a block, G gamma, B tokens to the target in one step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I32 = NDArray[np.int32]


class PrefixSchedule(NamedTuple):
    """What to verify and what it is expected to yield."""

    lengths: I32
    """Drafts to verify per request [R]."""
    tau: float
    """Expected tokens emitted by the step, one bonus per request included."""


def causal_lengths(survival_RG: F64, sps: F64, *, num_fixed_tokens: int = 0) -> PrefixSchedule:
    """Admit drafts by falling survival for as long as each one raises expected tokens per second.

    Ties go to the lower row, then to the lower position: an order that no drawn value influences,
    as long as the caller's row order does not look at drawn values either.

    Args:
        survival_RG: ``a_{r,j}``, product of the confidences up to j; not rising along a row,
            0 where there is no draft.
        sps: steps per second indexed by B (entry 0 unused). Its length caps the step.
        num_fixed_tokens: tokens of the step that are decided already (prompt chunks): they
            count in B and emit nothing.
    """
    num_requests, gamma = survival_RG.shape
    base = num_requests + num_fixed_tokens
    assert base < len(sps), f"a profile of {len(sps) - 1} tokens for a step of {base}"
    assert survival_RG.size == 0 or (survival_RG.min() >= 0 and survival_RG.max() <= 1)
    assert (survival_RG[:, 1:] <= survival_RG[:, :-1]).all(), "survival rises along a block"
    order = np.argsort(-survival_RG, axis=None, kind="stable")
    gains = survival_RG.ravel()[order]
    num_open = min(int(np.count_nonzero(gains)), len(sps) - 1 - base)
    tau = num_requests + np.concatenate([[0.0], np.cumsum(gains[:num_open])])
    theta = tau * sps[base : base + num_open + 1]
    pays = theta[1:] > theta[:-1]  # so far each one paid, hence the last is also the best
    num_admitted = num_open if pays.all() else int(pays.argmin())
    rows = order[:num_admitted] // max(gamma, 1)
    lengths = np.bincount(rows, minlength=num_requests).astype(np.int32)
    return PrefixSchedule(lengths=lengths, tau=float(tau[num_admitted]))
