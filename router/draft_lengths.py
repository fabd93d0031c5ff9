"""How many drafts of each row a lane has verified, and what it learns from their fate. Pure.

The survival that the scheduler weighs is the product of recalibrated confidences. Rows that the
scheduler cuts short never show what lay behind the cut; were that undervalued, it would stay so
for ever. So a small share of row-rounds is verified whole.

Exactness (rejection mode). Which rows those are is a keyed draw of its own stream by request id and
anchor: known before anything is drafted. They take part in the common walk like all others, and are
widened after it, in row order, as far as the step has room. So whether a token is verified still
depends on tokens admitted before it only, never on its own value or on what follows.

Shape legend: R rows, G most drafts of a row that may be verified.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from cluster.noise import KEYED, Stream
from cluster.sampling import REGIMES, regime_of
from cluster.wire import Sampling
from router.blocks import DraftBlock
from router.counters import LaneCounters
from router.lane_request import Emission, LaneRequest
from router.recalibration import Recalibrator
from router.reliability import F64, I64, Bools
from router.scheduler import I32, causal_lengths
from router.throughput import ThroughputProfile

_NONE: Final = np.zeros(0)


class Judged(NamedTuple):
    """A row that came back with its block judged."""

    block: DraftBlock
    sampling: Sampling
    emission: Emission


class DraftLengths:
    """Draft lengths of one lane.

    Args:
        recalibrator: of the drafter version that drafts for the lane, shared with other lanes.
        profile: of the lane's verifier.
        counters: of the router.
        explore_fraction: share of row-rounds that are verified whole.
    """

    def __init__(
        self,
        *,
        recalibrator: Recalibrator,
        profile: ThroughputProfile,
        counters: LaneCounters,
        explore_fraction: float,
    ) -> None:
        self._recalibrator = recalibrator
        self._profile = profile
        self._counters = counters
        self._explore_fraction = explore_fraction

    def choose(self, rows: Sequence[LaneRequest], *, num_prefill: int, room: int) -> list[int]:
        """Draft tokens to verify per row of the step that goes now.

        Args:
            num_prefill: prompt tokens in the step.
            room: draft tokens that fit into it.
        """
        usable = [_usable(request) for request in rows]
        width_R = np.array([len(confidence) for confidence in usable], np.int64)
        there_RG, confidence_RG = _grid(usable, width_R)
        regime_R = _regimes(request.sampling for request in rows)
        recalibrated_RG = self._recalibrator.apply(confidence_RG, regime_R)
        survival_RG = np.where(there_RG, recalibrated_RG, 0.0).cumprod(axis=1)
        most = min(survival_RG.size, room)
        sps = self._profile.sps(len(rows) + num_prefill + most)
        lengths_R = causal_lengths(survival_RG, sps, num_fixed_tokens=num_prefill).lengths
        self._explore(rows, width_R, lengths_R, room)
        return [int(length) for length in lengths_R]

    def learn(self, judged: Sequence[Judged]) -> None:
        """Take in the outcomes of one step, all rows at once."""
        judged = [row for row in judged if row.emission.num_verified]
        if not judged:
            return
        verified = [row.block.confidence[: row.emission.num_verified] for row in judged]
        verified_R = np.array([len(confidence) for confidence in verified], np.int64)
        there_RG, confidence_RG = _grid(verified, verified_R)
        regime_R = _regimes(row.sampling for row in judged)
        promised_RG = self._recalibrator.apply(confidence_RG, regime_R)
        survival_RG = np.where(there_RG, promised_RG, 0.0).cumprod(axis=1)
        self._counters.expected_accepted += float(survival_RG.sum())
        self._recalibrator.learn(
            confidence_RG,
            regime_R,
            num_reached_R=np.array([row.emission.num_reached for row in judged], np.int64),
            num_accepted_R=np.array([row.emission.num_accepted for row in judged], np.int64),
        )

    def _explore(
        self, rows: Sequence[LaneRequest], width_R: I64, lengths_R: I32, room: int
    ) -> None:
        """Widen the rows whose turn it is to look further, in place."""
        cut = np.flatnonzero(lengths_R < width_R).tolist()
        rids = np.array([rows[r].rid for r in cut], np.uint64)
        anchors = np.array([rows[r].anchor for r in cut], np.int64)
        turn = KEYED.uniform(Stream.EXPLORE, rids, anchors, 0) < self._explore_fraction
        left = room - int(lengths_R.sum())
        for r in itertools.compress(cut, turn):
            more = min(int(width_R[r] - lengths_R[r]), left)
            lengths_R[r] += more
            left -= more
            self._counters.num_explored_rows += more > 0
            self._counters.num_explored += more


def _regimes(samplings: Iterable[Sampling]) -> I64:
    """Indices [R] into `REGIMES`."""
    return np.array([REGIMES.index(regime_of(sampling)) for sampling in samplings], np.int64)


def _usable(request: LaneRequest) -> F64:
    """Confidences of the drafts in hand that may be verified."""
    return _NONE if request.block is None else request.block.confidence[: request.max_draft]


def _grid(ragged: Sequence[F64], width_R: I64) -> tuple[Bools, F64]:
    """Rows of these widths side by side: where there is something [R, G], and what, else 0."""
    there_RG = np.arange(width_R.max(initial=0)) < width_R[:, None]
    grid_RG = np.zeros(there_RG.shape)
    grid_RG[there_RG] = np.concatenate([_NONE, *ragged])
    return there_RG, grid_RG
