"""Synthetic verify rows, to time real steps without requests."""

from __future__ import annotations

from typing import Final

import numpy as np

from cluster.errors import InvalidRequest
from cluster.wire import Sampling
from verifier_service.acceptance import VerifyRow
from verifier_service.engine import EngineLimits
from verifier_service.torch_engine.attention import Span
from verifier_service.torch_engine.kv import BlockAllocator

_ROW_TOKENS: Final = 8
"""Longest synthetic row: an anchor and a block of 7."""

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


def synthetic_rows(
    num_tokens: int,
    context: int,
    allocator: BlockAllocator,
    limits: EngineLimits,
    *,
    row_tokens: int = _ROW_TOKENS,
) -> tuple[list[Span], list[VerifyRow]]:
    """Greedy rows of up to ``row_tokens`` tokens, ``num_tokens`` in all, each with ``context``
    positions before it.

    Rows get reservations of their own as far as the KV goes; the rest share the last one. The
    caller releases the reservations.

    Raises:
        InvalidRequest: past the limits of a step or of a request.
    """
    if not 1 <= num_tokens <= limits.max_step_tokens:
        raise InvalidRequest(f"num_tokens {num_tokens} is outside 1..{limits.max_step_tokens}")
    width = min(row_tokens, limits.max_model_len - context)
    if context < 0 or width < 1:
        raise InvalidRequest(f"context {context} is outside 0..{limits.max_model_len - 1}")
    spans: list[Span] = []
    rows: list[VerifyRow] = []
    for done in range(0, num_tokens, width):
        reservation = allocator.reserve(context + width)
        if reservation is None:
            if not spans:
                raise InvalidRequest(f"context {context} does not fit {limits.kv_blocks} KV blocks")
            reservation = spans[-1].reservation
        num = min(width, num_tokens - done)
        ids = (0,) * num
        spans.append(Span(ids=ids, first=context, reservation=reservation, num_logits=num))
        rows.append(VerifyRow(sampling=_GREEDY, ids=(0,), num_prompt=1, draft_ids=ids[1:], q=None))
    return spans, rows
