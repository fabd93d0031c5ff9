"""What a step tells the router."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from cluster.errors import DSparkError
from cluster.wire import Failure, Step, StepResult
from verifier_service.acceptance import RowVerdict
from verifier_service.engine import num_pairs
from verifier_service.live_request import LiveRequest


@dataclass(frozen=True, kw_only=True)
class Ran:
    """Tokens of one request that a step computed."""

    first: int
    """Position of the first one."""
    num_tokens: int
    is_prefill: bool
    num_cached: int = 0
    """Tokens before ``first`` that a prefix cache spared it."""


@dataclass(kw_only=True)
class Report:
    """Rows and failures of one step, gathered while it runs."""

    failures: list[Failure] = field(default_factory=list)
    rows: list[tuple[LiveRequest, RowVerdict, int]] = field(default_factory=list)
    """Verify rows, then finished prefills; the request as the step left it, and a finish code."""

    def fail(self, rid: int, error: DSparkError) -> None:
        self.failures.append(Failure(rid=rid, code=type(error).__name__, message=str(error)[:4096]))

    def result(
        self,
        step: Step,
        ran: Iterable[Ran],
        *,
        step_s: float,
        free_kv_blocks: int,
        pending_prefill_tokens: int,
        padded_tokens: int | None = None,
        num_preempted: int = 0,
    ) -> StepResult:
        """The frame.

        Args:
            padded_tokens: that the device computed; None if nothing was padded.
            num_preempted: requests that lost their KV.
        """
        ran = list(ran)
        requests = [request for request, _, _ in self.rows]
        verdicts = [verdict for _, verdict, _ in self.rows]
        num_tokens = sum(item.num_tokens for item in ran)
        return StepResult(
            lane_epoch=step.lane_epoch,
            step_id=step.step_id,
            rid=np.array([request.rid for request in requests], np.int64),
            num_accepted=np.array([verdict.num_accepted for verdict in verdicts], np.int32),
            num_emitted=np.array([len(verdict.token_ids) for verdict in verdicts], np.int32),
            token_ids=np.array([t for v in verdicts for t in v.token_ids], np.int32),
            logprobs=np.array([x for v in verdicts for x in v.logprobs], np.float32),
            anchor=np.array([request.anchor for request in requests], np.int32),
            digest=np.array([request.digest for request in requests], np.uint64),
            finish=np.array([finish for _, _, finish in self.rows], np.uint8),
            failures=tuple(self.failures),
            unbound=np.zeros(0, np.int64),
            num_real_tokens=num_tokens,
            num_padded_tokens=num_tokens if padded_tokens is None else padded_tokens,
            num_prefill_tokens=sum(item.num_tokens for item in ran if item.is_prefill),
            sum_context=sum(item.first + item.num_tokens for item in ran),
            num_pairs=sum(num_pairs(item.first, item.num_tokens) for item in ran),
            step_s=step_s,
            free_kv_blocks=free_kv_blocks,
            pending_prefill_tokens=pending_prefill_tokens,
            num_cached_tokens=sum(item.num_cached for item in ran),
            num_preempted=num_preempted,
        )
