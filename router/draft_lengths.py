"""How many drafts of each row a lane has verified, and what it learns from their fate. Pure.

The budget policy (`router.policies`) decides, from the survival of each draft, which is the product
of recalibrated confidences, the request's weight (`router.slo`) and the step times of the profile.
Two things must not be left to it, for they are worth knowing though they do not pay now:

* Rows that are cut short never show what lay behind the cut; were that undervalued, it would stay
  so for ever. So a small share of row-rounds is verified whole.
* Step sizes that are never chosen are never timed. So about one step in 64 has the size of a
  neighbouring tier of the profile.

Exactness (rejection mode). Which rows are widened is a keyed draw of its own stream by request id
and anchor, known before anything is drafted. They take part in the common walk like all others, and
are widened after it, in row order, as far as the step has room. Which steps explore a tier follows
from their number, and that tier from the size of the step before; its budget is filled in walk
order. So whether a token is verified still depends on earlier rounds and on tokens admitted before
it, never on its own value or on what follows.

Shape legend: R rows, G most drafts of a row that may be verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from cluster.config import SchedulingConfig
from cluster.errors import Unsupported
from cluster.noise import KEYED, Stream
from cluster.sampling import REGIMES
from router.blocks import DraftBlock
from router.counters import LaneCounters
from router.lane_request import Emission, LaneRequest
from router.policies import BudgetPolicy, PolicyInput, make_policy
from router.policies.walk import F64, I32, I64, Bools, admit
from router.recalibration import Recalibrator
from router.slo import weights
from router.step_load import StepLoad
from router.throughput import ThroughputProfile

_NONE: Final = np.zeros(0)
_MOST_POLICIES: Final = 8
"""Remembered by a lane: enough for whoever compares some."""


class Judged(NamedTuple):
    """A row that came back with its block judged."""

    block: DraftBlock
    regime: int
    """`LaneRequest.regime`."""
    emission: Emission


class DraftLengths:
    """Draft lengths of one lane.

    Args:
        recalibrator: of the drafter version that drafts for the lane, shared with other lanes.
        profile: of the lane's verifier.
        counters: of the router.
        explore_fraction: share of row-rounds that are verified whole.
        scheduling: which policy; see `configure`.

    Raises:
        ConfigError: no such policy.
    """

    def __init__(
        self,
        *,
        recalibrator: Recalibrator,
        profile: ThroughputProfile,
        counters: LaneCounters,
        explore_fraction: float,
        scheduling: SchedulingConfig,
    ) -> None:
        self._recalibrator = recalibrator
        self._profile = profile
        self._counters = counters
        self._explore_fraction = explore_fraction
        self._num_steps = 0
        self._usual_drafts = 0.0
        """Drafts per row of the latest step whose policy was followed."""
        self._scheduling = scheduling
        self._policies: dict[tuple[str, float], BudgetPolicy] = {}
        self._policy = self._policy_of(scheduling)

    def configure(self, scheduling: SchedulingConfig) -> None:
        """Follow this from the next step on. A policy that comes back finds what it remembered.

        Raises:
            ConfigError: no such policy; nothing has changed then.
        """
        self._policy = self._policy_of(scheduling)
        self._scheduling = scheduling

    def _policy_of(self, scheduling: SchedulingConfig) -> BudgetPolicy:
        """The one that was followed before under this name, or a new one."""
        key = scheduling.policy, scheduling.min_gain
        policy = self._policies.pop(key, None) or make_policy(key[0], min_gain=key[1])
        self._policies[key] = policy  # the latest last
        if len(self._policies) > _MOST_POLICIES:
            del self._policies[next(iter(self._policies))]
        return policy

    @property
    def verifies_drafts(self) -> bool:
        """False: no draft will be verified whatever it is worth, so none need be asked for."""
        return self._scheduling.policy not in ("none", "fixed:0")

    def choose(self, rows: Sequence[LaneRequest], *, load: StepLoad, room: int) -> list[int]:
        """Draft tokens to verify per row of the step that goes now. To be called once a step.

        Args:
            rows: in an order that no draft in hand has influenced.
            load: of the step without drafts.
            room: draft tokens that fit into it.
        """
        if not rows:
            return []
        step = self._look(rows, load, room)
        lengths_R = self._follow(step)
        self._policy.remember(step)
        if self._policy.weighs:
            self._widen(rows, step, lengths_R, room)
        chosen: list[int] = lengths_R.tolist()
        return chosen

    def _look(self, rows: Sequence[LaneRequest], load: StepLoad, room: int) -> PolicyInput:
        """The step as the policy sees it."""
        usable = [_usable(request) for request in rows]
        width_R = np.array([len(confidence) for confidence in usable], np.int64)
        there_RG, confidence_RG = _grid(usable, width_R)
        regime_R = np.array([request.regime for request in rows], np.int64)
        recalibrated_RG = self._recalibrator.apply(confidence_RG, regime_R)
        overhead_s = self._profile.overhead_s
        most = load.num_tokens + max(min(int(width_R.sum()), room), 0)
        return PolicyInput(
            survival_RG=np.where(there_RG, recalibrated_RG, 0.0).cumprod(axis=1),
            num_drafts_R=width_R,
            deterministic_R=np.array([not _is_drawn(request) for request in rows]),
            weight_R=weights(rows),
            rids=np.array([request.rid for request in rows], np.int64),
            step_s_B=self._profile.curve_s(load, most) + (overhead_s - self._prompt_s(load)),
            num_fixed_tokens=load.num_tokens - len(rows),
        )

    def _prompt_s(self, load: StepLoad) -> float:
        """What the prompt tokens of a step add to it.

        Drafts do not pay for them: every request needs its prompt computed once, however its tokens
        are made. Were that time counted, verifying more beside it would look cheap, and decoding as
        a whole would take longer.
        """
        if not load.num_prefill:
            return 0.0
        plain = replace(load, num_tokens=load.num_tokens - load.num_prefill, num_prefill=0)
        return max(self._profile.step_s(load) - self._profile.step_s(plain), 0.0)

    def _follow(self, step: PolicyInput) -> I32:
        """What the policy says, or the size that the profile wants to know about."""
        self._num_steps += 1
        offset = self._profile.explore(self._num_steps)
        if offset and self._policy.weighs and self._profile.live:
            usual = step.base + round(self._usual_drafts * len(step.rids))
            budget = self._profile.tier_at(usual, offset) - step.base
            self._counters.num_explored_steps += 1
            return admit(step.gains, step.falling, min(max(budget, 0), step.room))
        try:
            lengths_R = self._policy.lengths(step)
        except Unsupported:  # no draft is verified rather than a biased one: a plain step
            self._counters.num_refused_steps += 1
            lengths_R = np.zeros(len(step.rids), np.int32)
        self._usual_drafts = float(lengths_R.mean())
        return lengths_R

    def learn(self, judged: Sequence[Judged]) -> None:
        """Take in the outcomes of one step, all rows at once."""
        judged = [row for row in judged if row.emission.num_verified]
        if not judged:
            return
        verified = [row.block.confidence[: row.emission.num_verified] for row in judged]
        verified_R = np.array([len(confidence) for confidence in verified], np.int64)
        there_RG, confidence_RG = _grid(verified, verified_R)
        promised_RG = self._recalibrator.learn(
            confidence_RG,
            np.array([row.regime for row in judged], np.int64),
            num_reached_R=np.array([row.emission.num_reached for row in judged], np.int64),
            num_accepted_R=np.array([row.emission.num_accepted for row in judged], np.int64),
        )
        survival_RG = np.where(there_RG, promised_RG, 0.0).cumprod(axis=1)
        self._counters.expected_accepted += float(survival_RG.sum())

    def _widen(
        self, rows: Sequence[LaneRequest], step: PolicyInput, lengths_R: I32, room: int
    ) -> None:
        """Widen the rows whose turn it is to look further, in place."""
        width_R = step.num_drafts_R
        cut = np.flatnonzero(lengths_R < width_R)
        rids = step.rids[cut].astype(np.uint64)
        anchors = np.array([rows[r].anchor for r in cut.tolist()], np.int64)
        turn = KEYED.uniform(Stream.EXPLORE, rids, anchors, 0) < self._explore_fraction
        if not turn.any():
            return
        left = room - int(lengths_R.sum())
        for r in cut[turn].tolist():
            more = min(int(width_R[r] - lengths_R[r]), left)
            lengths_R[r] += more
            left -= more
            self._counters.num_explored_rows += more > 0
            self._counters.num_explored += more


def _is_drawn(request: LaneRequest) -> bool:
    """Whether its drafts were sampled, and will be judged by what they were sampled from."""
    drawn_from = None if request.block is None else request.block.q
    return drawn_from is not None and REGIMES[request.regime] == "rejection"


def _usable(request: LaneRequest) -> F64:
    """Confidences of the drafts in hand that may be verified."""
    block = request.block
    return _NONE if block is None else block.confidence[: request.max_draft]


def _grid(ragged: Sequence[F64], width_R: I64) -> tuple[Bools, F64]:
    """Rows of these widths side by side: where there is something [R, G], and what, else 0."""
    there_RG = np.arange(width_R.max(initial=0)) < width_R[:, None]
    grid_RG = np.zeros(there_RG.shape)
    grid_RG[there_RG] = np.concatenate([_NONE, *ragged])
    return there_RG, grid_RG
