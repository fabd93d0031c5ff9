"""What asking for drafts is expected to bring a lane: worth, times and costs put together. Pure.

`router.gating` decides by it. What is known of texts (`router.draft_worth`), of rounds
(`router.round_times`), of drafters (`router.draft_cost`) and of the verifier's steps meets here in
one plan (`router.draft_plan`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cluster.config import SchedulingConfig
from router.draft_cost import Drafting, drafting
from router.draft_plan import DraftPlan, Round, StepTimes, best_plan
from router.draft_worth import AS_VERIFIED, F64, LEVELS, DraftWorth, Worth, down_to
from router.drafter_book import DrafterBook
from router.lane_request import LaneRequest
from router.round_times import RoundTimes
from router.slo import weights
from router.step_load import StepLoad

_LOOKS_AT_SURVIVAL: Final = ("adaptive", "causal", "lagged", "retrospective")
_ROW_MARGIN: Final = 0.02
"""A request that was passed over counts as worth so much less than its figures say."""
_LANE_MARGIN: Final = 0.02
"""A lane without drafts starts again for so much more tokens per second."""


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """What the lane decodes at the moment of a decision."""

    load: StepLoad
    """Of a step of all its requests, without drafts."""
    times: StepTimes
    """Of the verifier."""
    room: int
    """Draft tokens that fit into a step."""
    others: Sequence[LaneRequest] = ()
    """Those that are not decided about now: in another step, or waiting for their blocks."""


class DraftOutlook:
    """Plans of one lane.

    Args:
        book: drafters, with the profiles of their links.
        worth: of blocks.
        times: of rounds.
        device: of the verifier; empty: not known, and no drafter's.
    """

    def __init__(
        self, *, book: DrafterBook, worth: DraftWorth, times: RoundTimes, device: str
    ) -> None:
        self.scheduling = SchedulingConfig()
        self._book = book
        self._worth = worth
        self._times = times
        self._device = device

    def plan(
        self, mine: Sequence[LaneRequest], decoding: Decoding, *, chosen: Collection[int]
    ) -> tuple[DraftPlan, Drafting]:
        """The best plan for these and all others that can be drafted for, these first; and what
        drafting for them takes.

        Args:
            chosen: ids of requests for which asking was expected to pay before.
        """
        candidates = [*mine, *draftable(decoding.others)]
        expected = self._worth.expect(self._worth.rows(candidates))
        weighs = self.scheduling.policy in _LOOKS_AT_SURVIVAL
        part, levels = slice(AS_VERIFIED, None), LEVELS[:1]
        if weighs:
            part, levels = slice(0, AS_VERIFIED), LEVELS
        trust_C = [1.0 if r.rid in chosen else 1 - _ROW_MARGIN for r in candidates]
        worth = Worth(
            expected.accepted[:, part] * np.array(trust_C)[:, None],
            expected.verified[:, part],
        )
        takes = self.drafting_of(candidates)
        shared = self.shares(candidates)
        weight_C = weights(candidates)
        if weighs and np.ptp(weight_C):
            worth, levels = _weighted(worth, weight_C)
        num_rows = decoding.load.num_rows
        facts = Round(
            load=decoding.load,
            times=decoding.times,
            room=decoding.room,
            total_weight=float(weight_C.sum()) + num_rows - len(candidates),
            gap_s=self._times.rest.seconds,
            slow_down=self._times.at(num_rows).factors if shared else np.ones_like,
            takes_turns=not shared and self.scheduling.gather != "wait_for_all",
        )
        least_gain = 1.0 if chosen else 1.0 + _LANE_MARGIN
        plan = best_plan(worth, levels, takes, facts, weight_C=weight_C, least_gain=least_gain)
        return plan, takes

    def drafting_of(self, candidates: Iterable[LaneRequest]) -> Drafting:
        """What it takes to draft for some of these."""
        refs = [r.drafter for r in candidates if r.drafter is not None]
        return drafting(self._book, refs, price=self.scheduling.draft_price)

    def shares(self, requests: Iterable[LaneRequest]) -> bool:
        """Whether the verifier's device drafts for any of these."""
        devices = {r.drafter.device for r in requests if r.drafter is not None}
        return bool(self._device) and self._device in devices


def draftable(requests: Iterable[LaneRequest]) -> list[LaneRequest]:
    """Those that can be drafted for."""
    return [r for r in requests if r.drafter is not None and r.wants_draft]


def _weighted(worth: Worth, weight_C: F64) -> tuple[Worth, F64]:
    """Outcomes where drafts are verified down to a *weighted* survival, and those levels: of a
    request that counts more, more is verified."""
    levels = np.unique(np.outer([weight_C.min(), weight_C.max()], LEVELS))
    return down_to(worth, levels / weight_C[:, None]), levels
