"""The torch engine: one ragged forward per step over verify rows and prompt chunks.

A step, in reading order (`TorchEngine.step`): release, admit, turn rows and the prefill budget
into work, run the model once, judge, commit, report. Prefill is first in, first out.

KV is reserved in full at admission (see `kv`): an admitted request always finishes. Drafts past
a request's last token are not computed, so no slack for gamma is needed. Rejected drafts leave
their keys behind; the next step that reaches those positions overwrites them. What was computed
stays findable behind a request's end (see `prefix_cache`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch

from cluster.errors import DSparkError, FrameError, Overloaded
from cluster.wire import FINISH_NONE, Admission, Step
from verifier_service.acceptance import truncate
from verifier_service.engine import EngineLimits, StepOutcome, StepShape
from verifier_service.live_request import check_admission, most_ids
from verifier_service.prefix_rows import PrefixRows
from verifier_service.projection import Projects
from verifier_service.step_report import Report
from verifier_service.torch_engine.commits import Commit, commit, project
from verifier_service.torch_engine.compute import Computed, compute
from verifier_service.torch_engine.kv import BlockAllocator, KVCache
from verifier_service.torch_engine.measure import synthetic_step
from verifier_service.torch_engine.model import TargetModel
from verifier_service.torch_engine.prefix_cache import PrefixCache
from verifier_service.torch_engine.requests import (
    Request,
    Work,
    check_room,
    prefill_work,
    verify_work,
)


class TorchEngine:
    """`verifier_service.engine.Engine` over a `TargetModel`.

    Args:
        model: loaded weights.
        limits: what it may hold; KV for ``kv_blocks`` blocks is allocated here.
        projection: usually of the drafter (`FeatureProjection`), None to ship no features.
        prefix_cache: whether prompts may begin behind what was computed before.
        prefix_rows_bytes: of projected rows kept for it.
    """

    def __init__(
        self,
        model: TargetModel,
        limits: EngineLimits,
        projection: Projects | None = None,
        *,
        prefix_cache: bool = False,
        prefix_rows_bytes: int = 0,
    ) -> None:
        self._model = model
        self._limits = limits
        self._projection = projection
        self._taps = () if projection is None else projection.target_layer_ids
        self._requests: dict[int, Request] = {}
        self._allocator = BlockAllocator(
            num_blocks=limits.kv_blocks, block_tokens=limits.kv_block_tokens
        )
        self._cache = KVCache(
            num_layers=model.spec.num_layers,
            num_slots=limits.kv_blocks * limits.kv_block_tokens,
            num_kv_heads=model.spec.num_kv_heads,
            head_dim=model.spec.head_dim,
            dtype=model.dtype,
            device=model.device,
        )
        store = PrefixRows(max_bytes=prefix_rows_bytes, block_tokens=limits.kv_block_tokens)
        self._prefix = PrefixCache(
            self._allocator,
            self._cache,
            rows=None if projection is None else store,
            enabled=prefix_cache,
        )

    @property
    def limits(self) -> EngineLimits:
        """See `Engine.limits`."""
        return self._limits

    def check(self, admission: Admission) -> None:
        """See `Engine.check`."""
        check_admission(admission, self._limits)

    @torch.inference_mode()
    def step(self, step: Step) -> StepOutcome:
        """See `Engine.step`."""
        started_s = time.perf_counter()
        report = Report()
        for rid in step.releases.tolist():
            self._release(rid)
        self._admit(step.admissions, report)
        work = self._take_rows(step, report)
        num_verify = sum(item.num_tokens for item in work)
        work += self._take_chunks(
            min(step.prefill_budget, self._limits.max_step_tokens - num_verify)
        )
        commits: list[Commit] = []
        if work:
            spans, rows = [item.span for item in work], [item.row for item in work]
            computed = compute(self._model, self._cache, self._taps, spans, rows)
            commits = self._commit(work, computed, report)
        result = report.result(
            step,
            [item.ran for item in work],
            step_s=time.perf_counter() - started_s,
            free_kv_blocks=self._allocator.free_blocks,
            pending_prefill_tokens=sum(r.pending_prefill for r in self._requests.values()),
        )
        return StepOutcome(
            result=result,
            committed=tuple(item.rows for item in commits),
            gauges=self._prefix.gauges(),
        )

    def release_all(self) -> None:
        """See `Engine.release_all`.

        The prefix cache stays: it depends on ids and weights alone, and requests that come back
        under the next lease, with what they had emitted, find what they had computed.
        """
        for rid in list(self._requests):
            self._release(rid)

    @torch.inference_mode()
    def measure_step(self, shape: StepShape) -> float:
        """See `Engine.measure_step`."""
        assert not self._requests, "profiling with requests in hand"
        spans, rows = synthetic_step(shape, self._allocator, self._limits)
        try:
            started_s = time.perf_counter()
            computed = compute(self._model, self._cache, self._taps, spans, rows)
            if self._projection is not None and computed.features is not None:
                self._projection(computed.features).cpu()
            return time.perf_counter() - started_s
        finally:
            for reservation in {span.reservation for span in spans}:
                self._allocator.release(reservation)

    # --- taking work ------------------------------------------------------------------------

    def _release(self, rid: int) -> None:
        request = self._requests.pop(rid, None)
        if request is not None:
            self._prefix.leave(request)
            self._allocator.release(request.reservation)

    def _admit(self, admissions: Iterable[Admission], report: Report) -> None:
        for admission in admissions:
            try:
                self._requests[admission.rid] = self._admitted(admission)
            except DSparkError as error:
                report.fail(admission.rid, error)

    def _admitted(self, admission: Admission) -> Request:
        self.check(admission)
        if admission.rid in self._requests:
            raise FrameError(f"request {admission.rid} is already here")
        if len(self._requests) >= self._limits.max_requests:
            raise Overloaded(f"{self._limits.max_requests} requests are in hand")
        ids: list[int] = admission.ids.tolist()
        most = most_ids(admission, self._limits)
        found = self._prefix.find(admission, ids)
        # The last token's keys are never needed: nothing comes after it.
        reservation = self._allocator.reserve(most - 1)
        if reservation is None:
            raise Overloaded(
                f"{self._allocator.blocks_for(most - 1)} KV blocks needed, "
                f"{self._allocator.free_blocks} free"
            )
        request = Request(admission=admission, reservation=reservation, most_ids=most, ids=ids)
        self._prefix.fill(request, found)
        return request

    def _take_rows(self, step: Step, report: Report) -> list[Work]:
        work: list[Work] = []
        taken: set[int] = set()
        num_tokens = 0
        for index, rid in enumerate(step.rid.tolist()):
            try:
                if rid in taken:
                    raise FrameError(f"request {rid} has two rows in one step")
                item = verify_work(step, index, self._requests.get(rid), self._limits)
                check_room(item, num_tokens, self._limits)
            except DSparkError as error:
                report.fail(rid, error)
                continue
            taken.add(rid)
            num_tokens += item.num_tokens
            work.append(item)
        return work

    def _take_chunks(self, budget: int) -> list[Work]:
        chunks: list[Work] = []
        for request in self._requests.values():
            if request.prefilled or budget <= 0:
                continue
            cached_TD = None if request.has_begun else self._prefix.begin(request)
            chunks.append(prefill_work(request, budget, cached_TD))
            budget -= chunks[-1].num_tokens
        return chunks

    # --- giving back ------------------------------------------------------------------------

    def _commit(self, work: Sequence[Work], computed: Computed, report: Report) -> list[Commit]:
        """Append what was emitted, advance every request, keep its rows, free what finished."""
        commits: list[Commit] = []
        for index, item in enumerate(work):
            request = item.request
            if index in computed.broken:
                self._drop_broken(request, report)
                continue
            finish, num_rows = FINISH_NONE, item.num_tokens
            if item.row is not None:
                verdict, finish = truncate(
                    computed.verdicts[index],
                    stop_ids=request.stop_ids,
                    remaining=request.remaining,
                )
                request.ids.extend(verdict.token_ids)
                num_rows = num_rows if item.is_prefill else len(verdict.token_ids)
                request.prefilled = True
                report.rows.append((request, verdict, finish))
            offset = computed.offsets[index]
            commits.append(commit(item, offset, num_rows, finished=finish != FINISH_NONE))
        commits = project(commits, computed.features, self._projection)
        for done in commits:
            self._prefix.keep(done.request, done.first_position, done.computed_TD)
            if done.rows.finished:
                self._release(done.request.rid)
        return commits

    def _drop_broken(self, request: Request, report: Report) -> None:
        """End a request whose numbers are not finite, and leave none of them behind."""
        reservation = request.reservation
        self._cache.clear(reservation.slots(0, reservation.capacity))
        self._prefix.forget(request)
        self._release(request.rid)
        report.fail(request.rid, DSparkError("the target's hidden states are not finite"))
