"""Synthetic steps of vLLM's own, to time real ones without requests."""

from __future__ import annotations

import time
from typing import Final

from cluster.errors import InvalidRequest
from cluster.sampling import plain_sampling
from verifier_service.engine import EngineLimits, StepShape
from verifier_service.live_request import RowDraft
from verifier_service.vllm.core import Core, CorePlan, NewRequest

_GREEDY: Final = plain_sampling(0.0, mode="coupled", seed=0)
_TOKEN: Final = 0


def measure_step(core: Core, shape: StepShape, limits: EngineLimits) -> float:
    """Seconds of one step of ``shape``, with whatever the KV holds for context.

    Rows are brought to their anchor by a step of one token each, which is not timed; the prompt
    chunk begins in the step that is. Every trace is removed afterwards, cached prefixes too.

    Raises:
        InvalidRequest: past the limits of a step or of a request, or of the KV.
    """
    _check(shape, limits)
    widths = shape.spans[: shape.num_rows]
    rids = list(range(len(widths) + 1))
    context = max(shape.context, 1)
    try:
        for rid, width in zip(rids, widths, strict=False):
            # Computed up to the last prompt token, which the untimed step computes; the token that
            # it emits is the anchor.
            _add(core, rid, num_ids=context, num_computed=context - 1, max_tokens=width + 2)
        if widths:
            core.step(CorePlan(prefill_budget=len(widths)), _use_all)
        if shape.num_prefill:
            # One token more than the chunk: it is not the last of its prompt.
            num_ids = shape.context + shape.num_prefill + 1
            _add(core, rids[-1], num_ids=num_ids, num_computed=shape.context, max_tokens=1)
        rows = {
            rid: RowDraft(draft_ids=(_TOKEN,) * (width - 1), q=None)
            for rid, width in zip(rids, widths, strict=False)
        }
        started_s = time.perf_counter()
        core.step(CorePlan(rows=rows, prefill_budget=shape.num_prefill), _use_all)
        return time.perf_counter() - started_s
    finally:
        core.drop(rids)
        core.step(CorePlan(), _use_all)  # workers forget a dropped request with the next step
        core.forget_prefixes()


def _check(shape: StepShape, limits: EngineLimits) -> None:
    num_tokens = shape.num_tokens + shape.num_prefill
    if not 1 <= num_tokens <= limits.max_step_tokens or shape.row_tokens < 1:
        raise InvalidRequest(f"{num_tokens} tokens are outside 1..{limits.max_step_tokens}")
    if shape.context < 0 or shape.context + max(shape.spans) + 1 > limits.max_model_len:
        raise InvalidRequest(
            f"a row of {max(shape.spans)} at context {shape.context} passes the limit of "
            f"{limits.max_model_len} positions"
        )
    if shape.num_rows + bool(shape.num_prefill) > limits.max_requests:
        raise InvalidRequest(f"{shape.num_rows} rows are more than {limits.max_requests} requests")


def _add(core: Core, rid: int, *, num_ids: int, num_computed: int, max_tokens: int) -> None:
    request = NewRequest(
        rid=rid,
        ids=[_TOKEN] * num_ids,
        num_prompt=num_ids,
        max_tokens=max_tokens,
        stop_ids=(),
        sampling=_GREEDY,
    )
    if not core.add_computed(request, num_computed):
        raise InvalidRequest(f"{num_ids} positions do not fit the KV")


def _use_all(rid: int, num_found: int) -> int:
    del rid
    return num_found
