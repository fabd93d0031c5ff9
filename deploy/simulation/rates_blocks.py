"""Blocks as a lane meets them in the steady state: a sample to decide over. Pure.

Text that accepts less has more rounds, so among the rows of a step the hard places are more
frequent than in the text: each is met in proportion to its rounds, one over its tau.

Shape legend: S sampled requests, A anchors looked at for each, N = S A blocks, R rows of a step,
G gamma, Z nodes of a quadrature.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deploy.simulation.acceptance import AcceptanceModel

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

_REQUESTS: Final = 1024
_ANCHORS: Final = 16
_STRIDE: Final = 97
"""Tokens between the anchors of a request: well beyond a block, and beyond most drifts."""
_NODES: Final = 12


class BlockSample:
    """Survival of blocks, true and as their drafter states it.

    Args:
        acceptance: the drafter and its texts.
        recalibrated: what the router weighs is corrected by the fate of earlier drafts. A logistic
            map takes the model's kind of miscalibration back entirely, so the weights are then the
            true survival.
    """

    def __init__(self, acceptance: AcceptanceModel, *, recalibrated: bool = True) -> None:
        self.gamma = acceptance.gamma
        keys = np.arange(_REQUESTS, dtype=np.uint64)
        self.domain_S: I64 = acceptance.domain_of(keys)
        traits_SG = acceptance.traits(keys)
        smooth = replace(acceptance, position_sd=0.0)
        true, stated, mean = [], [], []
        for a in range(_ANCHORS):
            anchor_S = np.full(_REQUESTS, a * _STRIDE)
            logit_SG = acceptance.logits(keys, anchor_S, traits_SG)
            true_SG = _sigmoid(logit_SG)
            true.append(true_SG)
            stated.append(true_SG if recalibrated else acceptance.confidence(logit_SG))
            place_SG = smooth.logits(keys, anchor_S, traits_SG)
            mean.append(_over_positions(place_SG, acceptance.position_sd))
        self._true_NG = _survival(true)
        self._stated_NG = _survival(stated)
        self._mean_NG = _survival(mean)
        """Over what may stand at the place."""
        self._order_N = np.argsort(self._true_NG.sum(axis=1), kind="stable")
        """Of blocks, from the least accepted to the best."""

    def steps(self, num_rows: int, num_steps: int, num_drafts: float) -> Iterator[tuple[F64, F64]]:
        """Rows of some steps: their true survival [R, G], and the stated one [R, G].

        All steps together hold every quality of block as often as it is met (a systematic sample);
        which step a block falls into is left to chance.

        Args:
            num_drafts: verified of a block, on average: by this the accepted lengths differ.
        """
        rng = np.random.default_rng([num_rows, num_steps])
        share_N = (1 / self._tau_by_block(num_drafts))[self._order_N]
        total = num_rows * num_steps
        at = (np.arange(total) + rng.random()) / total * share_N.sum()
        picked = np.searchsorted(share_N.cumsum(), at).clip(0, len(share_N) - 1)
        picked = self._order_N[rng.permutation(picked)]
        for rows in picked.reshape(num_steps, num_rows):
            yield self._true_NG[rows], self._stated_NG[rows]

    def tau_by_request(self, num_drafts: float) -> F64:
        """Tokens of a round [S] of each sampled request over its whole text, if so many drafts are
        verified."""
        tau_SA = self._tau_by_block(num_drafts).reshape(_REQUESTS, _ANCHORS)
        tau: F64 = 1 / (1 / tau_SA).mean(axis=1)
        return tau

    def _tau_by_block(self, num_drafts: float) -> F64:
        whole = min(int(num_drafts), self.gamma)
        tau_N: F64 = 1.0 + self._mean_NG[:, :whole].sum(axis=1)
        if whole < self.gamma:
            tau_N += (num_drafts - whole) * self._mean_NG[:, whole]
        return tau_N


def _survival(conditional: list[F64]) -> F64:
    """[N, G] of conditional acceptance [A] x [S, G]."""
    stacked_SAG = np.stack(conditional, axis=1)
    survival: F64 = stacked_SAG.cumprod(axis=2).reshape(-1, stacked_SAG.shape[2])
    return survival


def _over_positions(logit_SG: F64, position_sd: float) -> F64:
    """Mean acceptance over what positions differ by."""
    node_Z, weight_Z = np.polynomial.hermite_e.hermegauss(_NODES)
    mean: F64 = _sigmoid(logit_SG[..., None] + position_sd * node_Z) @ (weight_Z / weight_Z.sum())
    return mean


def _sigmoid(logit: F64) -> F64:
    probability: F64 = 1 / (1 + np.exp(-logit))
    return probability
