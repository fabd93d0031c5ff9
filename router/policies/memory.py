"""Survival values of earlier rounds, by request: what a budget may be computed from.

See `router.policies.policy` for the shape legend; M slots of the memory.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from router.policies.policy import PolicyInput
from router.policies.walk import F32, F64, I64

_MIN_SLOTS: Final = 64
_PRIOR_CONFIDENCE: Final = 0.75
"""Of every draft, before any block has been seen."""
_PRIOR_ROUNDS: Final = 8.0
"""What that counts for beside blocks seen."""
_MEMORY_ROUNDS: Final = 512
"""The mean over requests forgets with this many blocks."""


class SurvivalMemory:
    """The last block of each request, and the mean over all of them for requests that are new.

    A direct-mapped table: a request id has one slot, its remainder by a power of two. Ids are
    handed out in turn, so live requests rarely share one; of those that do, the older counts as
    new again. The table grows to twice the largest step, and is bounded by that.
    """

    def __init__(self) -> None:
        self._rids_M = np.full(_MIN_SLOTS, -1, np.int64)
        self._survival_MG: F32 = np.zeros((_MIN_SLOTS, 0), np.float32)
        self._sum_G = np.zeros(0)
        self._count_G = np.zeros(0)

    def expected(self, step: PolicyInput) -> F32:
        """What the blocks of this step are expected to survive with [R, G], before one looks: each
        request's last remembered block, the mean for new ones, 0 where there is no draft."""
        self._widen(step.survival_RG.shape[1])
        gamma = step.survival_RG.shape[1]
        slot_R = step.rids & (len(self._rids_M) - 1)
        known_R = self._rids_M[slot_R] == step.rids
        expected_RG = self._survival_MG[slot_R, :gamma]
        if not known_R.all():
            expected_RG[~known_R] = self.mean[:gamma]
        if (step.num_drafts_R < gamma).any():
            expected_RG[np.arange(gamma) >= step.num_drafts_R[:, None]] = 0.0
        return expected_RG

    @property
    def mean(self) -> F64:
        """Mean survival by place [G] over the blocks of late, the prior included; not rising."""
        mean: F64 = np.minimum.accumulate(self._sum_G / np.maximum(self._count_G, 1e-300))
        return mean

    def put(self, step: PolicyInput) -> None:
        """Remember the blocks of a step. Rows without one leave what is known of them."""
        survival_RG, num_R, rids = step.survival_RG, step.num_drafts_R, step.rids
        has_R = num_R > 0
        if not has_R.any():
            return
        if not has_R.all():
            survival_RG, num_R, rids = survival_RG[has_R], num_R[has_R], rids[has_R]
        gamma = survival_RG.shape[1]
        self._widen(gamma)
        there_RG = np.arange(gamma) < num_R[:, None]
        keep = (1.0 - 1.0 / _MEMORY_ROUNDS) ** len(num_R)
        self._sum_G *= keep
        self._count_G *= keep
        self._sum_G[:gamma] += survival_RG.sum(axis=0)
        self._count_G[:gamma] += there_RG.sum(axis=0)
        # Behind the end of a shorter block nothing was seen: the mean, but not above its last value
        last_R = survival_RG[np.arange(len(num_R)), num_R - 1].astype(np.float32)
        whole_RG = np.minimum(self.mean.astype(np.float32), last_R[:, None])
        np.copyto(whole_RG[:, :gamma], survival_RG, where=there_RG, casting="same_kind")
        self._store(rids, whole_RG)

    def _store(self, rids: I64, survival_RG: F32) -> None:
        while len(self._rids_M) < 2 * len(rids):
            self._double()
        slot_R = rids & (len(self._rids_M) - 1)
        self._rids_M[slot_R] = rids
        self._survival_MG[slot_R] = survival_RG

    def _double(self) -> None:
        """Twice the slots. No two requests that had a slot each come to share one."""
        old_rids, old_survival = self._rids_M, self._survival_MG
        used = old_rids >= 0
        num_slots = 2 * len(old_rids)
        self._rids_M = np.full(num_slots, -1, np.int64)
        self._survival_MG = np.zeros((num_slots, old_survival.shape[1]), np.float32)
        slots = old_rids[used] & (num_slots - 1)
        self._rids_M[slots] = old_rids[used]
        self._survival_MG[slots] = old_survival[used]

    def _widen(self, gamma: int) -> None:
        """Room for blocks of this many drafts."""
        old = len(self._sum_G)
        if gamma <= old:
            return
        prior = _PRIOR_CONFIDENCE ** np.arange(old + 1, gamma + 1)
        self._sum_G = np.concatenate([self._sum_G, _PRIOR_ROUNDS * prior])
        self._count_G = np.concatenate([self._count_G, np.full(gamma - old, _PRIOR_ROUNDS)])
        wide = np.zeros((len(self._rids_M), gamma), np.float32)
        wide[:, :old] = self._survival_MG
        wide[:, old:] = np.minimum(self.mean[old:], wide[:, old - 1 : old] if old else 1.0)
        self._survival_MG = wide
