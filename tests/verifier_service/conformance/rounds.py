"""A lane that drives any engine: it drafts what it is told to, waits where there is no room, and
admits again what the engine had to preempt.

Everything that an engine gives back is checked as it comes, whatever the test is about.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cluster import digest
from cluster.sparse import SparseQ
from cluster.wire import FINISH_NONE, Admission, Failure, StepResult
from tests.frames import Row, make_step
from verifier_service.engine import CommittedRows, Engine

_MAX_IDLE_STEPS: Final = 20


@dataclass(frozen=True, kw_only=True)
class Draft:
    """What a verify row asks for."""

    ids: Sequence[int] = ()
    q: SparseQ | None = None
    behind: Sequence[int] | None = None
    """Committed ids that the row claims to go on from; None: the true ones. A row that claims
    others must be refused as stale and change nothing."""


Drafter = Callable[[int, Sequence[int]], Draft]
"""(rid, committed ids) -> what to send for this request."""


def undrafted(rid: int, ids: Sequence[int]) -> Draft:
    """A plain decode step."""
    del rid, ids
    return Draft()


class Rounds:
    """Requests of one lane, as far as the engine has told.

    Args:
        engine: its requests are this lane's only.
        concurrency: most requests in flight.
    """

    def __init__(self, engine: Engine, *, concurrency: int = 1 << 30) -> None:
        self.engine = engine
        self.ids: dict[int, list[int]] = {}
        self.finish: dict[int, int] = {}
        self.num_accepted: Counter[int] = Counter()
        self.logprobs: dict[int, list[float]] = {}
        self.committed: dict[int, list[CommittedRows]] = {}
        """Since the request was last admitted."""
        self.refused: dict[int, str] = {}
        """Codes of admissions that were refused for good."""
        self.decoding: set[int] = set()
        self.num_stale = 0
        """Rows that were refused as they should."""
        self.num_preempted = 0
        """Requests that failed as stale though their row was right, or in their prefill."""
        self.num_reported_preempted = 0
        self.num_overloaded = 0
        self.num_cached = 0
        self._concurrency = concurrency
        self._num_idle_steps = 0
        self._admissions: dict[int, Admission] = {}
        self._waiting: deque[int] = deque()
        self._live: set[int] = set()
        self._dropped: list[int] = []

    # --- driving ---------------------------------------------------------------------------

    def add(self, *admissions: Admission) -> None:
        """Queue requests; the next steps admit them."""
        for admission in admissions:
            assert admission.rid not in self._admissions, admission.rid
            self._admissions[admission.rid] = admission
            self.ids[admission.rid] = admission.ids.tolist()
            self._waiting.append(admission.rid)

    def run(self, admissions: Sequence[Admission] = (), drafter: Drafter = undrafted) -> None:
        """Rounds until every request has ended."""
        self.add(*admissions)
        while self._waiting or self._live:
            self.step(drafter)

    def step(
        self,
        drafter: Drafter = undrafted,
        *,
        rids: Sequence[int] | None = None,
        releases: Sequence[int] = (),
        beside: Sequence[Row] = (),
        **changes: Any,
    ) -> StepResult:
        """One round: ``rids`` (default all that decode) are verified with their drafts.

        Args:
            beside: rows of other requests, behind these: what becomes of them is left to the
                caller.
        """
        chosen = sorted(self.decoding) if rids is None else rids
        drafts = {rid: drafter(rid, self.ids[rid]) for rid in chosen}
        for rid in releases:
            self._forget(rid)
        admitted = self._admitted()
        step = make_step(
            [*(self._row(rid, draft) for rid, draft in drafts.items()), *beside],
            admissions=tuple(self._continued(rid) for rid in admitted),
            releases=np.array([*self._dropped, *releases], np.int64),
            **(_packed_q(list(drafts.values())) | changes),
        )
        self._dropped = []
        outcome = self.engine.step(step)
        self._note_work(outcome.result)
        self.num_cached += outcome.result.num_cached_tokens
        self.num_reported_preempted += outcome.result.num_preempted
        foreign = {row.rid for row in beside}
        assert not foreign & {*drafts, *admitted}
        failures = [item for item in outcome.result.failures if item.rid not in foreign]
        self._read_failures(failures, drafts, admitted)
        self._read_rows(outcome.result, drafts)
        self._read_committed(outcome.committed)
        return outcome.result

    def emitted(self, rid: int) -> list[int]:
        """What a request has been given."""
        return self.ids[rid][self._admissions[rid].num_prompt :]

    # --- packing ---------------------------------------------------------------------------

    def _admitted(self) -> list[int]:
        room = min(self._concurrency, self.engine.limits.max_requests) - len(self._live)
        return [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]

    def _continued(self, rid: int) -> Admission:
        """Its admission, with what it has emitted so far behind the prompt."""
        self._live.add(rid)
        self.committed[rid] = []
        ids = np.array(self.ids[rid], np.int32)
        return dataclasses.replace(self._admissions[rid], ids=ids)

    def _row(self, rid: int, draft: Draft) -> Row:
        ids = self.ids[rid] if draft.behind is None else draft.behind
        return Row(rid=rid, ids=ids, draft_ids=draft.ids)

    def _note_work(self, result: StepResult) -> None:
        """A loop around an engine that has come to a halt must end."""
        self._num_idle_steps += 1
        if len(result.rid) or result.num_prefill_tokens:
            self._num_idle_steps = 0
        assert self._num_idle_steps < _MAX_IDLE_STEPS, "the engine does nothing any more"

    # --- reading ---------------------------------------------------------------------------

    def _read_failures(
        self, failures: Sequence[Failure], drafts: dict[int, Draft], admitted: list[int]
    ) -> None:
        failed = {failure.rid: failure for failure in failures}
        assert len(failed) == len(failures), failures
        for rid, draft in list(drafts.items()):
            if draft.behind is not None and list(draft.behind) != self.ids[rid]:
                assert failed.pop(rid).code == "StaleFrame", (rid, draft)
                del drafts[rid]
                self.num_stale += 1
        for rid, failure in failed.items():
            if rid in admitted and failure.code != "Overloaded":
                self.refused[rid] = failure.code
                self._forget(rid)
            elif rid in admitted:
                self.num_overloaded += 1
                self._live.discard(rid)
                self._waiting.appendleft(rid)
            elif failure.code == "StaleFrame":
                self.num_preempted += 1
                self._forget(rid)
                self._dropped.append(rid)
                self._waiting.appendleft(rid)
            else:
                # No room in this step; the row goes again.
                assert failure.code == "Overloaded", failure
                self.num_overloaded += 1

    def _read_rows(self, result: StepResult, drafts: dict[int, Draft]) -> None:
        ends = np.cumsum(result.num_emitted).tolist()
        for index, rid in enumerate(result.rid.tolist()):
            num = int(result.num_emitted[index])
            at = slice(ends[index] - num, ends[index])
            accepted, finish = int(result.num_accepted[index]), int(result.finish[index])
            assert rid in drafts or rid not in self.decoding, f"request {rid} has no good row"
            num_draft = len(drafts[rid].ids) if rid in self.decoding else 0
            assert 1 <= num <= accepted + 1
            assert num == accepted + 1 or finish != FINISH_NONE
            assert accepted <= num_draft
            self.ids[rid] += result.token_ids[at].tolist()
            self.logprobs.setdefault(rid, []).extend(result.logprobs[at].tolist())
            self.num_accepted[rid] += accepted
            assert int(result.anchor[index]) == len(self.ids[rid]) - 1
            assert int(result.digest[index]) == digest.of(self.ids[rid])
            self.decoding.add(rid)
            if finish != FINISH_NONE:
                self.finish[rid] = finish
                self._forget(rid)

    def _read_committed(self, committed: Sequence[CommittedRows]) -> None:
        for rows in committed:
            rid, before = rows.rid, self.committed[rows.rid]
            first = before[-1].first_position + len(before[-1].ids) if before else 0
            ids = self.ids[rid]
            assert rows.first_position == first, (rid, rows.first_position, first)
            assert list(rows.ids) == ids[first + 1 : first + 1 + len(rows.ids)]
            assert rows.digest == digest.of(ids[: first + 1 + len(rows.ids)])
            assert rows.features is None or len(rows.features) == len(rows.ids)
            assert rows.prefill_done == (rid in self.decoding or rid in self.finish)
            assert rows.finished == (rid in self.finish)
            before.append(rows)

    def _forget(self, rid: int) -> None:
        """It is not in the engine any more."""
        self._live.discard(rid)
        self.decoding.discard(rid)


def _packed_q(drafts: Sequence[Draft]) -> dict[str, Any]:
    """Fields of a step that carry q; the drafts that have one are all of one width."""
    qs = [draft.q for draft in drafts if draft.q is not None]
    if not qs:
        return {}
    return {
        "has_q": np.array([draft.q is not None for draft in drafts], np.uint8),
        "q_ids": np.concatenate([q.ids for q in qs]),
        "q_probs": np.concatenate([q.probs for q in qs]),
    }
