"""The vLLM engine: `verifier_service.engine.Engine` over an engine core that runs our plans.

A step, in reading order (`VllmEngine.step`): release, admit, turn rows into a plan, have the core
run it, commit, report. vLLM computes, holds KV and prefix cache, keeps grammars and adapters;
acceptance is `verifier_service.acceptance` on its logits, so texts are those of the torch engine.

What vLLM finds in its prefix cache it computes no hidden states for, so projected rows of whole
blocks are kept on the host too (`verifier_service.prefix_rows`), and a hit is used only as far as
they go. KV is promised in full at admission, as in the torch engine; with ``kv_overcommit`` more is
promised than there is, and a request whose KV is taken fails as stale: the lane admits it again.

Shape legend: T rows newly committed, D draft hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cluster.errors import DSparkError, FrameError, Overloaded, StaleFrame
from cluster.wire import FINISH_NONE, Admission, Step
from verifier_service.acceptance import truncate
from verifier_service.engine import CommittedRows, EngineLimits, StepOutcome, StepShape
from verifier_service.live_request import (
    LiveRequest,
    RowDraft,
    blocks_for,
    check_admission,
    most_ids,
    row_draft,
)
from verifier_service.prefix_rows import BlockFiller, PrefixRows, block_hashes
from verifier_service.step_report import Ran, Report
from verifier_service.vllm.core import Core, CorePlan, CoreRow, CoreStep, NewRequest
from verifier_service.vllm.measure import measure_step


@dataclass(kw_only=True)
class _Request(LiveRequest):
    """A request and what is kept of its rows."""

    num_blocks: int
    """Promised to it."""
    filler: BlockFiller | None
    hashes: list[bytes]
    """Of the whole blocks that it was admitted with."""
    cached: Tensor | None = None
    """[positions found in the prefix cache, D], until its first chunk has run."""
    num_cached: int = 0
    """Positions found in the prefix cache."""
    begun: bool = field(default=False)


class VllmEngine:
    """See the module.

    Args:
        core: loaded, holding no request.
        limits: what is promised to lanes.
        rows: where projected rows of prefixes are kept; None if no features are handed out.
        kv_overcommit: blocks promised over blocks that there are; part of ``limits`` already.
    """

    def __init__(self, core: Core, limits: EngineLimits, rows: PrefixRows | None) -> None:
        self._core = core
        self._limits = limits
        self._rows = rows
        self._requests: dict[int, _Request] = {}
        self._num_promised = 0

    @property
    def limits(self) -> EngineLimits:
        """See `Engine.limits`."""
        return self._limits

    def check(self, admission: Admission) -> None:
        """See `Engine.check`."""
        check_admission(admission, self._limits)
        self._core.check(_new_request(admission, self._limits))

    def step(self, step: Step) -> StepOutcome:
        """See `Engine.step`."""
        started_s = time.perf_counter()
        report = Report()
        self._release(step.releases.tolist())
        self._admit(step.admissions, report)
        plan = self._plan(step, report)
        done = CoreStep()
        if plan.rows or (plan.prefill_budget > 0 and self._has_prefill()):
            done = self._core.step(plan, self._limit_hit)
        ran = [self._ran(row) for row in done.rows]
        committed = self._commit(done, plan.rows, report)
        result = report.result(
            step,
            ran,
            step_s=time.perf_counter() - started_s,
            free_kv_blocks=self._core.free_blocks,
            pending_prefill_tokens=sum(r.pending_prefill for r in self._requests.values()),
            padded_tokens=done.num_padded,
            num_preempted=len(done.preempted),
        )
        return StepOutcome(result=result, committed=tuple(committed))

    def release_all(self) -> None:
        """See `Engine.release_all`. The prefix cache stays: its hashes name ids, not leases."""
        self._release(list(self._requests))

    @torch.inference_mode()
    def measure_step(self, shape: StepShape) -> float:
        """See `Engine.measure_step`."""
        assert not self._requests, "profiling with requests in hand"
        return measure_step(self._core, shape, self._limits)

    def close(self) -> None:
        """Free the device. The engine is of no use afterwards."""
        self._core.close()

    # --- taking work ------------------------------------------------------------------------

    def _has_prefill(self) -> bool:
        return any(not request.prefilled for request in self._requests.values())

    def _forget(self, rids: Iterable[int]) -> None:
        """What the core has freed already."""
        for rid in rids:
            request = self._requests.pop(rid, None)
            if request is not None:
                self._num_promised -= request.num_blocks

    def _release(self, rids: list[int]) -> None:
        self._core.drop(rids)
        self._forget(rids)

    def _admit(self, admissions: Iterable[Admission], report: Report) -> None:
        for admission in admissions:
            try:
                self._take(admission)
            except DSparkError as error:
                report.fail(admission.rid, error)

    def _take(self, admission: Admission) -> None:
        self.check(admission)
        limits, rid = self._limits, admission.rid
        if rid in self._requests:
            raise FrameError(f"request {rid} is already here")
        if len(self._requests) >= limits.max_requests:
            raise Overloaded(f"{limits.max_requests} requests are in hand")
        most = most_ids(admission, limits)
        # The last token's keys are never needed: nothing comes after it.
        num_blocks = blocks_for(most - 1, limits)
        if self._num_promised + num_blocks > limits.kv_blocks:
            raise Overloaded(
                f"{num_blocks} KV blocks needed, {limits.kv_blocks - self._num_promised} left"
            )
        ids: list[int] = admission.ids.tolist()
        salt = admission.adapter.encode()
        self._core.add(_new_request(admission, limits))
        self._requests[rid] = _Request(
            admission=admission,
            most_ids=most,
            ids=ids,
            num_blocks=num_blocks,
            filler=None if self._rows is None else BlockFiller(self._rows, salt=salt),
            hashes=[]
            if self._rows is None
            else block_hashes(ids[:-1], limits.kv_block_tokens, salt=salt),
        )
        self._num_promised += num_blocks

    def _plan(self, step: Step, report: Report) -> CorePlan:
        rows: dict[int, RowDraft] = {}
        room = self._limits.max_step_tokens
        for index, rid in enumerate(step.rid.tolist()):
            try:
                if rid in rows:
                    raise FrameError(f"request {rid} has two rows in one step")
                draft = row_draft(step, index, self._requests.get(rid), self._limits)
                num_tokens = 1 + len(draft.draft_ids)
                if num_tokens > room:
                    raise Overloaded(
                        f"the step has {self._limits.max_step_tokens - room} tokens; {num_tokens} "
                        f"more for request {rid} pass its limit of {self._limits.max_step_tokens}"
                    )
            except DSparkError as error:
                report.fail(rid, error)
                continue
            rows[rid] = draft
            room -= num_tokens
        return CorePlan(rows=rows, prefill_budget=min(step.prefill_budget, room))

    def _limit_hit(self, rid: int, num_found: int) -> int:
        """Cached prompt tokens that may be used: those whose rows are kept."""
        request = self._requests[rid]
        request.num_cached, request.cached = num_found, None
        if self._rows is None or num_found == 0:
            return num_found
        size = self._limits.kv_block_tokens
        num_blocks = min(self._rows.hits(request.hashes), num_found // size)
        request.num_cached = num_blocks * size
        if num_blocks:
            # In hand from here on: the store may drop them before the step has run.
            request.cached = self._rows.rows(request.hashes[:num_blocks])
        return request.num_cached

    # --- giving back ------------------------------------------------------------------------

    def _commit(
        self, done: CoreStep, planned: Mapping[int, RowDraft], report: Report
    ) -> list[CommittedRows]:
        """Append what was emitted, advance every request, forget what ended."""
        committed: list[CommittedRows] = []
        for row in done.rows:
            request = self._requests[row.rid]
            if row.broken:
                self._release([row.rid])
                report.fail(row.rid, DSparkError("the target's logits are not finite"))
                continue
            committed.append(self._commit_row(request, row, report))
            finished = committed[-1].finished
            assert finished == (row.rid in done.finished), (row.rid, finished)
        self._forget(done.finished)
        for rid, error in done.failed.items():
            self._forget([rid])
            report.fail(rid, error)
        for rid in done.preempted:
            self._forget([rid])
            report.fail(rid, StaleFrame(f"request {rid} lost its KV to others"))
        ran = {row.rid for row in done.rows} | set(done.preempted) | done.failed.keys()
        for rid in planned.keys() - ran:
            self._release([rid])
            report.fail(rid, StaleFrame(f"vLLM has not run request {rid}"))
        return committed

    def _ran(self, row: CoreRow) -> Ran:
        request = self._requests[row.rid]
        return Ran(
            first=row.first,
            num_tokens=row.num_tokens,
            is_prefill=not request.prefilled,
            num_cached=0 if request.begun else request.num_cached,
        )

    def _commit_row(self, request: _Request, row: CoreRow, report: Report) -> CommittedRows:
        features, finish, num_rows = row.features, FINISH_NONE, row.num_tokens
        if not request.begun:
            request.begun = True
            num_rows += request.num_cached
            if request.cached is not None and features is not None:
                features = torch.cat([request.cached, features])
            request.cached = None
        first = request.num_computed
        assert row.first + row.num_tokens == first + num_rows, (request.rid, row.first, first)
        if row.verdict is not None:
            verdict, finish = truncate(
                row.verdict, stop_ids=request.stop_ids, remaining=request.remaining
            )
            request.ids.extend(verdict.token_ids)
            if request.prefilled:
                num_rows = len(verdict.token_ids)
            request.prefilled = True
            report.rows.append((request, verdict, finish))
        if features is not None:
            features = features[:num_rows]
            if request.filler is not None:
                request.filler.extend(first, features, request.ids)
        return CommittedRows(
            rid=request.rid,
            first_position=first,
            ids=request.commit(num_rows),
            digest=request.digest,
            features=features,
            prefill_done=request.prefilled,
            finished=finish != FINISH_NONE,
        )


def _new_request(admission: Admission, limits: EngineLimits) -> NewRequest:
    ids: list[int] = admission.ids.tolist()
    return NewRequest(
        rid=admission.rid,
        ids=ids,
        num_prompt=admission.num_prompt,
        max_tokens=max(most_ids(admission, limits) - len(ids), 1),
        stop_ids=tuple(admission.stop_ids.tolist()),
        sampling=admission.sampling,
        constraint_kind=admission.constraint_kind,
        constraint=admission.constraint,
        adapter=admission.adapter,
    )
