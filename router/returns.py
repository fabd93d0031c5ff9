"""What a step that comes back means for each request of a lane. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from cluster.errors import error_for
from cluster.wire import FINISH_LENGTH, FINISH_NONE, Failure, StepResult
from router.counters import LaneCounters
from router.draft_sessions import DraftSessions
from router.exits import Exits
from router.flights import Flight
from router.lane_request import Emission, Failed, LaneRequest, Outcome, Phase, Retry
from router.roster import Roster
from router.step_result import ResultRow, read_result

_RETRIED: Final = frozenset(
    {"DSparkError", "StaleFrame", "FrameError", "Overloaded", "Unavailable"}
)
"""Failures of a row that say nothing about the request itself."""


class Returns:
    """Results of one lane.

    Args:
        vocab_size: of the target.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        roster: Roster,
        sessions: DraftSessions,
        exits: Exits,
        counters: LaneCounters,
    ) -> None:
        self._vocab_size = vocab_size
        self._roster = roster
        self._sessions = sessions
        self._exits = exits
        self._counters = counters
        self._num_blocks: Counter[str] = Counter()
        """That the step which is settled has asked for, by drafter."""
        self._ahead: frozenset[int] = frozenset()
        """Requests with a row in a step behind it."""

    def settle(
        self,
        result: StepResult,
        flight: Flight,
        now: float,
        *,
        asked: Counter[str],
        behind: Iterable[Flight],
    ) -> list[Outcome]:
        """Commit, finish, fail or retry whatever was in the step.

        Args:
            asked: blocks that the step has asked for, by drafter.
            behind: steps that are still in the air, maybe with rows of the same requests.

        Raises:
            FrameError: ids that do not exist.
        """
        rows = read_result(result, vocab_size=self._vocab_size)
        self._num_blocks = asked
        self._ahead = frozenset[int]().union(*(later.rows for later in behind))
        here = self._roster.requests
        outcomes: list[Outcome] = [
            self._settle_row(row, request, flight, now)
            for row in rows
            if (request := here.get(row.rid)) is not None
        ]
        # A crash may have taken requests along that are in the step behind this one.
        outcomes += [self._fail(failure) for failure in result.failures if failure.rid in here]
        settled = {outcome.rid for outcome in outcomes}
        for rid in flight.rows:
            if rid not in settled and rid in here:
                outcomes.append(self._give_up(rid, "the step says nothing about it"))
        # The session that a step behind this one opens is not the one that is lost here.
        rebound = frozenset[int]().union(*(later.rebound for later in behind))
        for rid in result.unbound.tolist():
            if rid not in rebound and (request := here.get(rid)):
                self._sessions.unbind(request, now, pause=True)
        return outcomes

    def _settle_row(
        self, row: ResultRow, request: LaneRequest, flight: Flight, now: float
    ) -> Outcome:
        planned = flight.rows.get(row.rid)
        num_draft = 0 if planned is None else planned.num_draft
        expected = Phase.PREFILLING if planned is None else Phase.IN_STEP
        if request.phase is not expected or not row.follows(request, num_draft):
            return self._give_up(row.rid, "the result does not follow from what was sent")
        block = request.block
        asked = request.asks_first if planned is None else planned.want_draft
        request.behind = not request.drafting
        request.drafting = asked and request.drafter is not None
        request.commit(row.token_ids, row.digest, now)
        finish = row.finish
        if finish != FINISH_NONE:
            self._exits.forget(row.rid)  # the verifier has freed it already
        elif request.remaining == 0:
            finish = FINISH_LENGTH
            self._exits.end(row.rid)
        elif request.drafting:
            drafter = request.drafter
            num_blocks = 0 if drafter is None else self._num_blocks[drafter.drafter_id]
            self._sessions.expect(request, now, num_blocks=num_blocks)
        elif request.rid not in self._ahead:
            request.enter(Phase.READY, now)
        return Emission(
            rid=row.rid,
            token_ids=row.token_ids,
            logprobs=row.logprobs,
            finish=finish,
            is_round=planned is not None,
            num_proposed=0 if block is None else len(block.ids),
            num_verified=num_draft,
            num_accepted=row.num_accepted,
        )

    def _fail(self, failure: Failure) -> Outcome:
        if failure.code in _RETRIED:
            return self._give_up(failure.rid, f"{failure.code}: {failure.message}")
        self._exits.end(failure.rid)
        return Failed(rid=failure.rid, error=error_for(failure.code, failure.message))

    def _give_up(self, rid: int, reason: str) -> Retry:
        self._counters.num_retries += 1
        self._exits.end(rid)
        return Retry(rid=rid, reason=reason)
