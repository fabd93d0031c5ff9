"""The torch engine: one ragged forward per step over verify rows and prompt chunks.

A step, in reading order (`TorchEngine.step`): release, admit, turn rows and the prefill budget
into work, run the model once, judge, commit, report. Prefill is first in, first out.

KV is reserved in full at admission (see `kv`): an admitted request always finishes. Drafts past
a request's last token are not computed, so no slack for gamma is needed. Rejected drafts leave
their keys behind; the next step that reaches those positions overwrites them.

Shape legend: T tokens or committed rows, F raw feature width, D draft hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cluster.errors import DSparkError, FrameError, Overloaded
from cluster.wire import FINISH_NONE, Admission, Step
from verifier_service.acceptance import truncate
from verifier_service.engine import CommittedRows, EngineLimits, StepOutcome, StepShape
from verifier_service.live_request import check_admission, most_ids
from verifier_service.projection import Projects
from verifier_service.step_report import Ran, Report
from verifier_service.torch_engine.compute import Computed, compute
from verifier_service.torch_engine.kv import BlockAllocator, KVCache
from verifier_service.torch_engine.measure import synthetic_step
from verifier_service.torch_engine.model import TargetModel
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
    """

    def __init__(
        self, model: TargetModel, limits: EngineLimits, projection: Projects | None = None
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
        num_verify = sum(len(item.span.ids) for item in work)
        work += self._take_chunks(
            min(step.prefill_budget, self._limits.max_step_tokens - num_verify)
        )
        committed: list[CommittedRows] = []
        if work:
            spans, rows = [item.span for item in work], [item.row for item in work]
            computed = compute(self._model, self._cache, self._taps, spans, rows)
            committed = self._commit(work, computed, report)
        result = report.result(
            step,
            (
                Ran(
                    first=item.span.first,
                    num_tokens=len(item.span.ids),
                    is_prefill=item.is_prefill,
                )
                for item in work
            ),
            step_s=time.perf_counter() - started_s,
            free_kv_blocks=self._allocator.free_blocks,
            pending_prefill_tokens=sum(r.pending_prefill for r in self._requests.values()),
        )
        return StepOutcome(result=result, committed=tuple(committed))

    def release_all(self) -> None:
        """See `Engine.release_all`."""
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
        most = most_ids(admission, self._limits)
        # The last token's keys are never needed: nothing comes after it.
        reservation = self._allocator.reserve(most - 1)
        if reservation is None:
            raise Overloaded(
                f"{self._allocator.blocks_for(most - 1)} KV blocks needed, "
                f"{self._allocator.free_blocks} free"
            )
        return Request(
            admission=admission,
            reservation=reservation,
            most_ids=most,
            ids=admission.ids.tolist(),
        )

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
            num_tokens += len(item.span.ids)
            work.append(item)
        return work

    def _take_chunks(self, budget: int) -> list[Work]:
        chunks: list[Work] = []
        for request in self._requests.values():
            if request.prefilled or budget <= 0:
                continue
            chunks.append(prefill_work(request, budget))
            budget -= len(chunks[-1].span.ids)
        return chunks

    # --- giving back ------------------------------------------------------------------------

    def _commit(
        self, work: Sequence[Work], computed: Computed, report: Report
    ) -> list[CommittedRows]:
        """Append what was emitted, advance every request, free what finished."""
        committed: list[CommittedRows] = []
        kept: list[int] = []
        for index, item in enumerate(work):
            request = item.request
            if index in computed.broken:
                self._drop_broken(request, report)
                continue
            finish, num_rows = FINISH_NONE, len(item.span.ids)
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
            first = computed.offsets[index]
            kept.extend(range(first, first + num_rows))
            committed.append(
                CommittedRows(
                    rid=request.rid,
                    first_position=request.num_computed,
                    ids=request.commit(num_rows),
                    digest=request.digest,
                    features=None,
                    prefill_done=request.prefilled,
                    finished=finish != FINISH_NONE,
                )
            )
            if finish != FINISH_NONE:
                self._release(request.rid)
        return self._with_features(committed, computed.features, kept)

    def _with_features(
        self, committed: list[CommittedRows], features_TF: Tensor | None, kept: list[int]
    ) -> list[CommittedRows]:
        """Project the committed rows, all requests in one product, and hand each its own."""
        if self._projection is None or features_TF is None or not kept:
            return committed
        index = torch.tensor(kept, device=features_TF.device)
        rows_TD = self._projection(features_TF.index_select(0, index)).cpu()
        parts = torch.split(rows_TD, [len(item.ids) for item in committed])
        return [replace(item, features=part) for item, part in zip(committed, parts, strict=True)]

    def _drop_broken(self, request: Request, report: Report) -> None:
        """End a request whose numbers are not finite, and leave none of them behind."""
        reservation = request.reservation
        self._cache.clear(reservation.slots(0, reservation.capacity))
        self._release(request.rid)
        report.fail(request.rid, DSparkError("the target's hidden states are not finite"))
