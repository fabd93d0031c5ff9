"""Synthetic steps, to time real ones without requests."""

from __future__ import annotations

from typing import Final

import numpy as np

from cluster.errors import InvalidRequest
from cluster.wire import Sampling
from verifier_service.acceptance import VerifyRow
from verifier_service.engine import EngineLimits, StepShape
from verifier_service.torch_engine.attention import Span
from verifier_service.torch_engine.kv import BlockAllocator, Reservation

_GREEDY: Final = Sampling(
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    bias_ids=np.zeros(0, np.int32),
    bias_values=np.zeros(0, np.float32),
    seed=0,
    mode="coupled",
    logprobs=False,
)


def synthetic_step(
    shape: StepShape, allocator: BlockAllocator, limits: EngineLimits
) -> tuple[list[Span], list[VerifyRow | None]]:
    """Greedy verify rows, and perhaps a prompt chunk that is not the last of its prompt.

    Each gets a reservation of its own as far as the KV goes; the rest share the last one. The
    caller releases the reservations.

    Raises:
        InvalidRequest: past the limits of a step or of a request.
    """
    num_tokens = shape.num_tokens + shape.num_prefill
    if not 1 <= num_tokens <= limits.max_step_tokens or shape.row_tokens < 1:
        raise InvalidRequest(f"{num_tokens} tokens are outside 1..{limits.max_step_tokens}")
    if shape.context < 0 or shape.context + max(shape.spans) > limits.max_model_len:
        raise InvalidRequest(
            f"a row of {max(shape.spans)} at context {shape.context} passes the limit of "
            f"{limits.max_model_len} positions"
        )
    spans: list[Span] = []
    rows: list[VerifyRow | None] = []
    for index, num in enumerate(shape.spans):
        ids = (0,) * num
        verify = index < shape.num_rows
        spans.append(
            Span(
                ids=ids,
                first=shape.context,
                reservation=_reservation(shape.context + num, spans, allocator),
                num_logits=num if verify else 0,
            )
        )
        row = VerifyRow(sampling=_GREEDY, ids=(0,), num_prompt=1, draft_ids=ids[1:], q=None)
        rows.append(row if verify else None)
    return spans, rows


def _reservation(num_slots: int, spans: list[Span], allocator: BlockAllocator) -> Reservation:
    reservation = allocator.reserve(num_slots)
    if reservation is not None:
        return reservation
    if spans and spans[-1].reservation.capacity >= num_slots:
        return spans[-1].reservation
    for taken in {span.reservation for span in spans}:
        allocator.release(taken)
    raise InvalidRequest(f"{num_slots} positions do not fit the KV")
