"""What a step tells the router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cluster.errors import DSparkError
from cluster.wire import Failure, Step, StepResult
from verifier_service.acceptance import RowVerdict
from verifier_service.engine import num_pairs
from verifier_service.torch_engine.requests import Request, Work


@dataclass(kw_only=True)
class Report:
    """Rows and failures of one step, gathered while it runs."""

    failures: list[Failure] = field(default_factory=list)
    rows: list[tuple[Request, RowVerdict, int]] = field(default_factory=list)
    """Verify rows, then finished prefills; the request as the step left it, and a finish code."""

    def fail(self, rid: int, error: DSparkError) -> None:
        self.failures.append(Failure(rid=rid, code=type(error).__name__, message=str(error)[:4096]))

    def result(
        self,
        step: Step,
        work: Sequence[Work],
        *,
        step_s: float,
        free_kv_blocks: int,
        pending_prefill_tokens: int,
    ) -> StepResult:
        """The frame. Nothing is padded, so padded tokens are the real ones."""
        requests = [request for request, _, _ in self.rows]
        verdicts = [verdict for _, verdict, _ in self.rows]
        num_tokens = sum(len(item.span.ids) for item in work)
        return StepResult(
            lane_epoch=step.lane_epoch,
            step_id=step.step_id,
            rid=np.array([request.rid for request in requests], np.int64),
            num_accepted=np.array([verdict.num_accepted for verdict in verdicts], np.int32),
            num_emitted=np.array([len(verdict.token_ids) for verdict in verdicts], np.int32),
            token_ids=np.array([t for v in verdicts for t in v.token_ids], np.int32),
            logprobs=np.array([x for v in verdicts for x in v.logprobs], np.float32),
            anchor=np.array([len(request.ids) - 1 for request in requests], np.int32),
            digest=np.array([request.digest for request in requests], np.uint64),
            finish=np.array([finish for _, _, finish in self.rows], np.uint8),
            failures=tuple(self.failures),
            unbound=np.zeros(0, np.int64),
            num_real_tokens=num_tokens,
            num_padded_tokens=num_tokens,
            num_prefill_tokens=sum(len(item.span.ids) for item in work if item.is_prefill),
            sum_context=sum(item.span.end for item in work),
            num_pairs=sum(num_pairs(item.span.first, len(item.span.ids)) for item in work),
            step_s=step_s,
            free_kv_blocks=free_kv_blocks,
            pending_prefill_tokens=pending_prefill_tokens,
        )
