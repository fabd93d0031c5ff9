"""The online recalibrator: what a drafter's confidence is worth here and now (DESIGN section 5).

The scheduler weighs drafts by the probability that they survive, so a confidence must mean what it
says. Offline calibration (`drafter_service.calibration`) saw other texts; a drafter without a
confidence head reports something else altogether. So each position k of a block has a logistic map

    c' = sigmoid(a_k * logit(c) + b_k)

for each of three regimes (greedy, coupled, rejection: they accept by different rules), learnt from
the outcomes of the rounds that this router drives. Pure: no clock, no I/O, no randomness.

*What it learns from.* Positions reached: verified, every earlier draft accepted, not cut off by
the end of the request. Of others nothing is known. Whether a position was verified depended on its
own confidence; a fit *given* the confidence does not mind such a choice of samples. Earlier
confidences of the block and other rows decided as well: should they say more about the outcome
than the position's own logit does, the fit leans towards the rows that were verified. The few
rounds that are verified whole (`router.draft_lengths`) are chosen without looking.

*How.* Each (regime, position) keeps a table of outcomes over logit bins that forgets slowly, and
the map is the most probable one given that table and a normal prior around identity: a penalised
logistic regression, a few Newton steps from where the last ones ended. Nothing a drafter sends
moves a parameter past its bounds, and a > 0 keeps the order of confidences. With few samples the
map is the identity.

*Exactness* (rejection mode). The map used for a step is a function of steps whose results are in;
`learn` is called when a result is applied, `apply` when a later step is formed. Those results hold
draws that the steps to come do not share: every uniform is keyed by request seed and anchor, each
round has a new anchor, and drafts that were not verified die with their block. Given the past the
map is a constant, so a step's lengths are as non-anticipating as with confidences taken as they
come; it does not matter that request A's outcome moves request B's map, or which lane saw it. (That
B's draws are independent of A's takes two seeds, here as everywhere: of requests that a client
gives one and the same, the first tells how the others' draws fall at the same anchors.)
`tests/exactness/test_recalibration.py` enumerates that.

Shape legend: R rows, G places of a block, C cells (regime and position), M bins, N samples.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np

from cluster.sampling import REGIMES
from router.logits import MAX_LOGIT, logit, sigmoid, within
from router.reliability import F64, I64, ReliabilityTables

MIN_SAMPLES: Final = 64
"""A position with fewer is left as it is."""
MEMORY: Final = 2048
"""Samples: a change in what a position's confidence means is followed within twice as many."""
MAX_SLOPE: Final = 3.0
MIN_SLOPE: Final = 0.1
MAX_SHIFT: Final = 6.0

_POSITIONS: Final = 32
"""Positions with a map of their own; those behind share the last one."""
_LOGIT_BINS: Final = 32
_ECE_BINS: Final = 10
_SLOPE_PRIOR: Final = 16.0
"""Inverse variance of a around 1: standard deviation 1/4."""
_SHIFT_PRIOR: Final = 9.0
"""Inverse variance of b around 0: standard deviation 1/3, worth some 60 even samples."""
_NEWTON_STEPS: Final = 2
_MAX_STEP: Final = 1.0
_REFIT_EVERY: Final = 16
"""New samples of a cell before its map is fitted again."""
_VERSIONS: Final = 4
_sum: Final = np.add.reduce
_NAME_LENGTH: Final = 16
"""Places of a fingerprint in a figure's name: enough for all settings of prompt lookup."""


class Recalibrator:
    """Maps of one drafter version, shared by all lanes of a router that draft with it.

    Args:
        min_samples: positions with fewer keep the identity.
        enabled: False: all keep it, while the maps are learnt all the same.
    """

    def __init__(self, *, min_samples: float = MIN_SAMPLES, enabled: bool = True) -> None:
        self.enabled = enabled
        num_cells = len(REGIMES) * _POSITIONS
        self._min_samples = min_samples
        self._slope_C = np.ones(num_cells)
        self._shift_C = np.zeros(num_cells)
        self._num_samples_C = np.zeros(num_cells, np.int64)
        self._num_new_C = np.zeros(num_cells, np.int64)
        self._outcomes = _tables(_LOGIT_BINS, -MAX_LOGIT, MAX_LOGIT)
        self._reported = _tables(_ECE_BINS, 0.0, 1.0)
        self._mapped = _tables(_ECE_BINS, 0.0, 1.0)

    def apply(self, confidence_RG: F64, regime_R: I64) -> F64:
        """Conditional confidences [R, G] as the rounds so far correct them.

        Args:
            confidence_RG: as reported, in [0, 1].
            regime_R: indices into `REGIMES`.
        """
        return self._map(confidence_RG, _cells(regime_R, confidence_RG.shape[1]))

    def learn(
        self, confidence_RG: F64, regime_R: I64, num_reached_R: I64, num_accepted_R: I64
    ) -> F64:
        """Take in the outcomes of one step.

        Args:
            confidence_RG: as reported; places that were not reached may hold anything.
            regime_R: indices into `REGIMES`.
            num_reached_R: drafts whose fate is known, from the first one on.
            num_accepted_R: those that survived, all of them or all but the last.

        Returns:
            What `apply` said before.
        """
        places = np.arange(confidence_RG.shape[1])
        reached = places < num_reached_R[:, None]
        cells = _cells(regime_R, len(places))
        mapped_RG = self._map(confidence_RG, cells)
        cell_N, confidence_N = cells[reached], confidence_RG[reached]
        hit_N = (places < num_accepted_R[:, None])[reached]
        self._reported.add(cell_N, confidence_N, hit_N)
        # With the maps from before these outcomes: the error shown is that of real predictions.
        self._mapped.add(cell_N, mapped_RG[reached], hit_N)
        self._outcomes.add(cell_N, logit(confidence_N), hit_N)
        count_C = np.bincount(cell_N, minlength=len(self._num_samples_C))
        self._num_samples_C += count_C
        self._num_new_C += count_C
        due = (self._num_new_C >= _REFIT_EVERY) & (self._num_samples_C >= self._min_samples)
        if due.any():
            self._num_new_C[due] = 0
            self._fit(np.flatnonzero(due))
        return mapped_RG

    def figures(self) -> dict[str, float]:
        """For every regime and position with samples, counted from 1, e.g. ``greedy.2.samples``.

        ``slope`` and ``shift`` are a and b as learnt, ``accepted`` the share of samples accepted;
        ``reported`` and ``recalibrated`` are the mean confidence before and after the map, and
        ``reported_ece`` and ``recalibrated_ece`` its expected calibration error in ten bins. All
        but ``samples`` forget, see `MEMORY`.
        """
        reported_C, accepted_C = self._reported.means()
        columns = {
            "samples": self._num_samples_C,
            "slope": self._slope_C,
            "shift": self._shift_C,
            "accepted": accepted_C,
            "reported": reported_C,
            "recalibrated": self._mapped.means()[0],
            "reported_ece": self._reported.expected_error(),
            "recalibrated_ece": self._mapped.expected_error(),
        }
        return {
            f"{REGIMES[cell // _POSITIONS]}.{cell % _POSITIONS + 1}.{name}": float(column[cell])
            for cell in np.flatnonzero(self._num_samples_C).tolist()
            for name, column in columns.items()
        }

    def _map(self, confidence: F64, cells: I64) -> F64:
        if not self.enabled:
            return confidence
        mapped = self._slope_C[cells] * logit(confidence) + self._shift_C[cells]
        learnt = self._num_samples_C[cells] >= self._min_samples
        return np.where(learnt, sigmoid(mapped), confidence)

    def _fit(self, cells: I64) -> None:
        """Newton steps of the penalised log-likelihood of these cells' tables.

        The prior keeps the Hessian away from singular (one bin only says nothing of a apart from
        b). The step in b is the best one for the step in a that the bounds left over.
        """
        n = self._outcomes.weights[cells]
        z = self._outcomes.values[cells] / np.maximum(n, np.finfo(np.float64).tiny)
        hits = self._outcomes.hits[cells]
        a, b = self._slope_C[cells], self._shift_C[cells]
        for _ in range(_NEWTON_STEPS):
            p = sigmoid(a[:, None] * z + b[:, None])
            hoped = n * p
            residual, weight = hits - hoped, hoped * (1 - p)
            weighted = weight * z
            gradient_a = _sum(residual * z, axis=1) - _SLOPE_PRIOR * (a - 1)
            gradient_b = _sum(residual, axis=1) - _SHIFT_PRIOR * b
            h_aa = _sum(weighted * z, axis=1) + _SLOPE_PRIOR
            h_ab = _sum(weighted, axis=1)
            h_bb = _sum(weight, axis=1) + _SHIFT_PRIOR
            step = (h_bb * gradient_a - h_ab * gradient_b) / (h_aa * h_bb - h_ab * h_ab)
            before = a
            a = within(a + within(step, -_MAX_STEP, _MAX_STEP), MIN_SLOPE, MAX_SLOPE)
            step = (gradient_b - h_ab * (a - before)) / h_bb
            b = within(b + within(step, -_MAX_STEP, _MAX_STEP), -MAX_SHIFT, MAX_SHIFT)
        self._slope_C[cells], self._shift_C[cells] = a, b


class RecalibratorBook:
    """The recalibrators of a router, one per drafter version; a new version starts from nothing.

    The last few versions are remembered: one that is rolled back to finds its maps again.

    Args:
        enabled: whether maps are applied; see `switch`.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._by_version: dict[str, Recalibrator] = {}

    def switch(self, *, enabled: bool) -> None:
        """Apply the maps, or leave confidences as they are and only learn."""
        self._enabled = enabled
        for recalibrator in self._by_version.values():
            recalibrator.enabled = enabled

    def of(self, fingerprint: str) -> Recalibrator:
        """The recalibrator of the drafters that hold this checkpoint."""
        found = self._by_version.pop(fingerprint, None)
        recalibrator = found or Recalibrator(enabled=self._enabled)
        self._by_version[fingerprint] = recalibrator
        if len(self._by_version) > _VERSIONS:
            del self._by_version[next(iter(self._by_version))]
        return recalibrator

    def figures(self) -> dict[str, float]:
        """`Recalibrator.figures` of all, behind the first places of the fingerprint and a dot."""
        return {
            f"{fingerprint[:_NAME_LENGTH]}.{name}": value
            for fingerprint, recalibrator in self._by_version.items()
            for name, value in recalibrator.figures().items()
        }


def _tables(num_bins: int, low: float, high: float) -> ReliabilityTables:
    num_cells = len(REGIMES) * _POSITIONS
    return ReliabilityTables(
        num_cells=num_cells, num_bins=num_bins, low=low, high=high, memory=MEMORY
    )


def _cells(regime_R: I64, gamma: int) -> I64:
    """Cell of each place [R, G]."""
    cells: I64 = regime_R[:, None] * _POSITIONS + _positions(gamma)
    return cells


@lru_cache
def _positions(gamma: int) -> I64:
    """[G]"""
    return np.minimum(np.arange(gamma), _POSITIONS - 1)
