"""What a block is worth to each request, from the blocks of earlier rounds. Pure.

How much of a block is verified depends on the load, so one number per request will not do. A block
is worth ``A(L)`` accepted drafts at the price of ``N(L)`` verified ones if drafts are verified down
to a survival of L: two falling curves over L, averaged over past blocks. A step that can afford
another level reads off another point. That is what a request's text *and* the drafter's confidence
in it are worth: a drafter that knows when it is right pays where one with the same acceptance that
does not know fails to.

Each request has curves of its own that forget: with every block of its own, and more slowly with
every round that went without. What is left of them is shrunk to the mean over all requests of its
regime, so a request that was not drafted for a while counts as any other again. How much is
verified follows from what the recalibrated confidences promise; what that is worth, from what came
true of such promises at each place of a block, for the regime and then for the request. So a
drafter without a confidence head, or one with recalibration turned off, is not believed.

Exactness (rejection mode): nothing here looks at a block that has not gone into a step.

Shape legend: R requests, G places of a block, L levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cluster.sampling import REGIMES, regime_of
from router.lane_request import LaneRequest
from router.recalibration import Recalibrator

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

LEVELS: Final = np.linspace(0.0, 0.9, 10)
"""Survival down to which drafts are verified; the first is the whole block."""
AS_VERIFIED: Final = len(LEVELS)
"""One level more: as much as the policy did verify, for policies with rules of their own."""
NUM_LEVELS: Final = AS_VERIFIED + 1

_OWN_KEPT: Final = 0.9
"""Of a request's curves, with each new block of its own."""
_KEPT_PLAIN: Final = 0.98
"""Of those with each round without one."""
_OWN_PRIOR: Final = 3.0
"""Blocks that the mean of the regime weighs as much as."""
_MEAN_KEPT: Final = 1 - 1 / 128
"""Of the mean of a regime, with each block: over several requests, not over the latest one's, or a
single text that drafts badly would stand for all that follow."""
_MEAN_KEPT_PLAIN: Final = 0.995
"""Of its weight, with each round without a block."""
_FIRST_SURVIVAL: Final = np.power(0.8, np.arange(1, 8))
"""Of the block that is expected before any was seen: hopeful, so that drafting is tried."""
_FIRST_WEIGHT: Final = 4.0
_TOLD_KEPT: Final = 1 - 1 / 256
"""Of what was promised and came true at each place, with each judged block of the regime."""
_TOLD_PRIOR: Final = 2.0
_OWN_TOLD_PRIOR: Final = 48.0
"""Drafts that "promises are kept" weighs as much as, at each place and for each request."""
_TOLD_BOUNDS: Final = (0.05, 1.5)
_PLACES: Final = 32
"""With figures of their own; those behind share the last one's."""
_KNOWN_BLOCKS: Final = 96
"""From so many blocks on a regime is known: the recalibrator has samples by then."""


class Worth(NamedTuple):
    """Expected outcome of a block, per request and level [R, L]."""

    accepted: F64
    verified: F64


def down_to(worth: Worth, survival_RP: F64) -> Worth:
    """Outcomes [R, P] at other levels than `LEVELS`, between which they are straight; at a survival
    of 1 nothing is verified.

    Args:
        worth: at `LEVELS`.
        survival_RP: down to which drafts are verified, by row.
    """
    place_RP = survival_RP.clip(0.0, 1.0) * len(LEVELS)
    low_RP = np.minimum(place_RP.astype(np.int64), len(LEVELS) - 1)
    share_RP = place_RP - low_RP

    def between(curve_RL: F64) -> F64:
        padded = np.pad(curve_RL, ((0, 0), (0, 1)))
        low, high = (np.take_along_axis(padded, low_RP + n, axis=1) for n in (0, 1))
        outcome_RP: F64 = low + share_RP * (high - low)
        return outcome_RP

    return Worth(between(worth.accepted), between(worth.verified))


class DraftWorth:
    """The curves of one lane's requests. Rows of its tables belong to requests until `forget`.

    Args:
        recalibrator: of the confidences that blocks report.
    """

    def __init__(self, recalibrator: Recalibrator) -> None:
        self._recalibrator = recalibrator
        hopeful = _FIRST_SURVIVAL[None]
        first = _curves(hopeful, hopeful, np.array([hopeful.size]))
        self._mean = np.repeat(first, len(REGIMES), axis=0)
        """[regimes, 2, L] mean A and N."""
        self._mean_weight = np.full(len(REGIMES), _FIRST_WEIGHT)
        self._told = np.full((len(REGIMES), 2, _PLACES), _TOLD_PRIOR)
        """[regimes, 2, places] drafts that were promised to survive, and that did."""
        self._num_blocks = np.zeros(len(REGIMES), np.int64)
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._curves = np.zeros((0, 2, NUM_LEVELS))
        self._weight = np.zeros(0)
        self._kept = np.zeros((0, 2))
        """[rows, 2] drafts expected to survive by all that is known of the regime, that did."""
        self._regime = np.zeros(0, np.int64)

    def rows(self, requests: Sequence[LaneRequest]) -> I64:
        """Table rows [R] of requests; new ones get one."""
        known = self._rows
        return np.array(
            [known[r.rid] if r.rid in known else self._add(r) for r in requests], np.int64
        )

    def forget(self, rid: int) -> None:
        """The request is over; unknown ones are ignored."""
        row = self._rows.pop(rid, None)
        if row is not None:
            self._free.append(row)

    def is_known(self, requests: Sequence[LaneRequest]) -> bool:
        """Whether there were enough blocks in the regimes of most of these requests."""
        row_R = self.rows(requests)  # may move the tables: before they are looked at
        regime_R = self._regime[row_R]
        known_R = self._num_blocks[regime_R] >= _KNOWN_BLOCKS
        return bool(2 * known_R.sum() > len(known_R))

    def expect(self, row_R: I64) -> Worth:
        """What a block would give each of these requests."""
        own = self._curves[row_R] + _OWN_PRIOR * self._mean[self._regime[row_R]]
        curves = own / (self._weight[row_R] + _OWN_PRIOR)[:, None, None]
        expected, came = self._kept[row_R].T
        ratio_R = ((came + _OWN_TOLD_PRIOR) / (expected + _OWN_TOLD_PRIOR)).clip(*_TOLD_BOUNDS)
        return Worth(np.minimum(curves[:, 0] * ratio_R[:, None], curves[:, 1]), curves[:, 1])

    def mean(self, regime: str) -> tuple[float, float]:
        """Accepted drafts of a whole block, and how many come true of one that is promised."""
        index = REGIMES.index(regime)
        promised, came = self._told[index].sum(axis=1) - _PLACES * _TOLD_PRIOR
        return float(self._mean[index, 0, 0]), float(came / promised) if promised > 0 else 1.0

    def see(self, requests: Sequence[LaneRequest], verified_R: I64) -> list[F64]:
        """The blocks of these requests go into a step, so much of each.

        Returns:
            For each what `judge` wants to know: promised survival of the verified drafts.
        """
        if not requests:
            return []
        row_R = self.rows(requests)
        regime_R = self._regime[row_R]
        promised_RG = self._survival(requests, regime_R)
        places = np.arange(promised_RG.shape[1]).clip(max=_PLACES - 1)
        expected_RG = promised_RG * self._ratios(regime_R)[:, places]
        self._learn(row_R, _curves(promised_RG, np.minimum(expected_RG, 1.0), verified_R))
        return [promised_RG[n, :num] for n, num in enumerate(verified_R.tolist())]

    def miss(self, requests: Sequence[LaneRequest]) -> None:
        """Their blocks were asked for and did not come: that is what asking was worth."""
        if requests:
            self._learn(self.rows(requests), np.zeros((len(requests), 2, NUM_LEVELS)))

    def pass_over(self, requests: Sequence[LaneRequest], *, num_rounds: int) -> None:
        """Rounds without a block: what is known of these requests fades."""
        if requests:
            row_R = self.rows(requests)
            kept = _KEPT_PLAIN**num_rounds
            self._curves[row_R] *= kept
            self._weight[row_R] *= kept
            self._kept[row_R] *= kept
            # What was true when there were blocks must not outweigh the next one for ever.
            regimes = np.unique(self._regime[row_R])
            faded = self._mean_weight[regimes] * _MEAN_KEPT_PLAIN**num_rounds
            self._mean_weight[regimes] = np.maximum(faded, _FIRST_WEIGHT)

    def judge(self, rids: Sequence[int], promised: Sequence[F64], accepted_R: I64) -> None:
        """What became of verified drafts.

        Args:
            promised: as `see` returned it for each.
            accepted_R: how many drafts survived.
        """
        if not rids:
            return
        row_R = np.array([self._rows[rid] for rid in rids], np.int64)
        regime_R = self._regime[row_R]
        outcome_RP = np.zeros((len(rids), 2, _PLACES))
        for n, survival in enumerate(promised):
            outcome_RP[n, 0, : len(survival)] = survival[:_PLACES]
            outcome_RP[n, 1, : accepted_R[n]] = 1.0
        expected_R = (outcome_RP[:, 0] * self._ratios(regime_R)).sum(axis=1)
        came_R = outcome_RP[:, 1].sum(axis=1)
        self._kept[row_R] = _OWN_KEPT * self._kept[row_R] + np.stack([expected_R, came_R], axis=1)
        for regime in np.unique(regime_R):
            new = outcome_RP[regime_R == regime]
            kept = _TOLD_KEPT ** len(new)
            faded = self._told[regime] * kept + _TOLD_PRIOR * (1 - kept)
            self._told[regime] = faded + new.sum(axis=0)

    def _ratios(self, regime_R: I64) -> F64:
        """Drafts that come true of one that is promised, [R, places]."""
        promised, came = self._told[regime_R, 0], self._told[regime_R, 1]
        ratios: F64 = (came / promised).clip(*_TOLD_BOUNDS)
        return ratios

    def _learn(self, row_R: I64, curves_R: F64) -> None:
        """One block each, as curves [R, 2, L]."""
        self._curves[row_R] = _OWN_KEPT * self._curves[row_R] + curves_R
        self._weight[row_R] = _OWN_KEPT * self._weight[row_R] + 1
        regime_R = self._regime[row_R]
        for regime in np.unique(regime_R):
            new = curves_R[regime_R == regime]
            weight = self._mean_weight[regime] * _MEAN_KEPT ** len(new)
            total = self._mean[regime] * weight + new.sum(axis=0)
            self._mean_weight[regime] = weight + len(new)
            self._mean[regime] = total / self._mean_weight[regime]
            self._num_blocks[regime] += len(new)

    def _survival(self, requests: Sequence[LaneRequest], regime_R: I64) -> F64:
        """Of the requests' whole blocks, 0 behind their ends [R, G]."""
        blocks = [request.block.confidence for request in requests if request.block is not None]
        num_R = np.array([len(confidence) for confidence in blocks])
        there_RG = np.arange(num_R.max()) < num_R[:, None]
        confidence_RG = np.zeros(there_RG.shape)
        confidence_RG[there_RG] = np.concatenate(blocks)
        recalibrated_RG = self._recalibrator.apply(confidence_RG, regime_R)
        survival_RG: F64 = np.where(there_RG, recalibrated_RG, 0.0).cumprod(axis=1)
        return survival_RG

    def _add(self, request: LaneRequest) -> int:
        if not self._free:
            have = len(self._weight)
            more = max(have, 16)
            self._free = list(range(have + more - 1, have - 1, -1))
            self._curves = np.concatenate([self._curves, np.zeros((more, 2, NUM_LEVELS))])
            self._weight = np.concatenate([self._weight, np.zeros(more)])
            self._kept = np.concatenate([self._kept, np.zeros((more, 2))])
            self._regime = np.concatenate([self._regime, np.zeros(more, np.int64)])
        row = self._free.pop()
        self._rows[request.rid] = row
        self._curves[row] = self._weight[row] = self._kept[row] = 0.0
        self._regime[row] = REGIMES.index(regime_of(request.sampling))
        return row


def _curves(promised_RG: F64, expected_RG: F64, verified_R: I64) -> F64:
    """A and N of each block at each level: [R, 2, L]. The policy goes by what is promised, what
    comes of it is what is to be expected."""
    num, width = promised_RG.shape
    curves = np.zeros((num, 2, NUM_LEVELS))
    taken_RGL = promised_RG[:, :, None] > LEVELS
    as_verified_RG = np.arange(width) < verified_R[:, None]
    curves[:, 0, :AS_VERIFIED] = np.einsum("rg,rgl->rl", expected_RG, taken_RGL)
    curves[:, 1, :AS_VERIFIED] = taken_RGL.sum(axis=1)
    curves[:, 0, AS_VERIFIED] = (expected_RG * as_verified_RG).sum(axis=1)
    curves[:, 1, AS_VERIFIED] = as_verified_RG.sum(axis=1)
    return curves
