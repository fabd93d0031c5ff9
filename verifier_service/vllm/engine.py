"""The vLLM engine: `verifier_service.engine.Engine` over an engine core that runs our plans.

A step, in reading order (`VllmEngine.step`): release, admit, turn rows into a plan, have the core
run it, commit, report. vLLM computes, holds KV and prefix cache, keeps grammars and adapters;
acceptance is `verifier_service.acceptance` on its logits, so texts are those of the torch engine.

What vLLM finds in its prefix cache it computes no hidden states for, so projected rows of whole
blocks are kept on the host too (`verifier_service.prefix_rows`), and a hit is used only as far as
they go. KV is promised in full at admission, as in the torch engine; with ``kv_overcommit`` more is
promised than there is, and a request whose KV is taken fails as stale: the lane admits it again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from cluster.errors import DSparkError, FrameError, Overloaded, StaleFrame
from cluster.wire import Admission, Step
from verifier_service.engine import CommittedRows, EngineLimits, StepOutcome, StepShape
from verifier_service.live_request import (
    RowDraft,
    blocks_for,
    check_admission,
    most_ids,
    row_draft,
)
from verifier_service.prefix_rows import PrefixRows
from verifier_service.step_report import Report
from verifier_service.vllm.core import Core, CorePlan, CoreRow, CoreStep
from verifier_service.vllm.measure import measure_step
from verifier_service.vllm.requests import VllmRequest, live_request, new_request


class VllmEngine:
    """See the module.

    Args:
        core: loaded, holding no request.
        limits: what is promised to lanes.
        rows: where projected rows of prefixes are kept; None if no features are handed out.
    """

    def __init__(self, core: Core, limits: EngineLimits, rows: PrefixRows | None) -> None:
        self._core = core
        self._limits = limits
        self._rows = rows
        self._requests: dict[int, VllmRequest] = {}
        self._num_promised = 0

    @property
    def limits(self) -> EngineLimits:
        """See `Engine.limits`."""
        return self._limits

    def check(self, admission: Admission) -> None:
        """See `Engine.check`."""
        check_admission(admission, self._limits)
        self._core.check(new_request(admission, self._limits))

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
        rows = _in_step_order(done.rows, plan)
        ran = [self._requests[row.rid].ran(row) for row in rows]
        committed = self._commit(replace(done, rows=rows), plan.rows, report)
        result = report.result(
            step,
            ran,
            step_s=time.perf_counter() - started_s,
            free_kv_blocks=self._core.free_blocks,
            pending_prefill_tokens=sum(r.pending_prefill for r in self._requests.values()),
            padded_tokens=done.num_padded,
            num_preempted=len(done.preempted),
        )
        return StepOutcome(result=result, committed=tuple(committed), gauges=self._gauges())

    def release_all(self) -> None:
        """See `Engine.release_all`. The prefix cache stays: its hashes name ids, not leases."""
        self._release(list(self._requests))

    @torch.inference_mode()
    def measure_step(self, shape: StepShape) -> float:
        """See `Engine.measure_step`."""
        assert not self._requests, "profiling with requests in hand"
        return measure_step(self._core, shape, self._limits)

    def close(self) -> None:
        """Free the device and what vLLM holds of this process: no other vLLM engine in it is of any
        use afterwards."""
        self._core.close()

    # --- taking work ------------------------------------------------------------------------

    def _gauges(self) -> dict[str, float]:
        if self._rows is None:
            return {}
        return {
            "prefix_rows_bytes": self._rows.num_bytes,
            "prefix_rows_evicted": self._rows.num_evicted,
        }

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
        # The last token's keys are never needed: nothing comes after it.
        num_blocks = blocks_for(most_ids(admission, limits) - 1, limits)
        if self._num_promised + num_blocks > limits.kv_blocks:
            raise Overloaded(
                f"{num_blocks} KV blocks needed, {limits.kv_blocks - self._num_promised} left"
            )
        self._core.add(new_request(admission, limits))
        self._requests[rid] = live_request(
            admission, limits, num_blocks=num_blocks, store=self._rows
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
        return self._requests[rid].limit_hit(num_found)

    # --- giving back ------------------------------------------------------------------------

    def _commit(
        self, done: CoreStep, planned: Mapping[int, RowDraft], report: Report
    ) -> list[CommittedRows]:
        """Append what was emitted, advance every request, forget what ended."""
        committed: list[CommittedRows] = []
        for row in done.rows:
            request = self._requests[row.rid]
            if row.broken:
                self._drop_broken(request)
                report.fail(row.rid, DSparkError("the target's logits are not finite"))
                continue
            committed.append(request.commit_row(row, report))
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

    def _drop_broken(self, request: VllmRequest) -> None:
        """End a request whose numbers are not finite, and leave none of them behind."""
        self._core.drop_broken(request.rid)
        self._forget([request.rid])
        request.forget_rows()


def _in_step_order(rows: Sequence[CoreRow], plan: CorePlan) -> tuple[CoreRow, ...]:
    """Verify rows as the step has them, then prompt chunks: vLLM has an order of its own."""
    places = {rid: place for place, rid in enumerate(plan.rows)}
    return tuple(sorted(rows, key=lambda row: places.get(row.rid, len(places))))
