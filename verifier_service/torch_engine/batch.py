"""From the spans of a step to one flat batch on the device, and back.

Shape legend: T tokens of the batch, M tokens whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from verifier_service.torch_engine.attention import Span, arrange, build_group
from verifier_service.torch_engine.model import TargetModel, TokenBatch


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where each span ended up. Spans run in attention-group order, not in the caller's."""

    order: tuple[int, ...]
    """Indices of the caller's spans, in batch order; logits come in this order."""
    offsets: tuple[int, ...]
    """By the caller's index: first token of the span in the batch."""
    batch: TokenBatch


def lay_out(spans: Sequence[Span], model: TargetModel) -> Layout:
    """Build the batch of at least one span."""
    device, spec = model.device, model.spec
    windows = frozenset(spec.windows)
    groups, order, offsets = [], [], [0] * len(spans)
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    for members in arrange(spans):
        rows = [spans[index] for index in members]
        groups.append(
            build_group(
                rows,
                token=len(ids),
                windows=windows,
                heads_per_kv=spec.num_heads // spec.num_kv_heads,
                dtype=model.dtype,
                device=device,
            )
        )
        for index, span in zip(members, rows, strict=True):
            order.append(index)
            offsets[index] = len(ids)
            ids.extend(span.ids)
            positions.extend(range(span.first, span.end))
            slots.extend(span.reservation.slots(span.first, len(span.ids)))
            logit_rows.extend(range(len(ids) - span.num_logits, len(ids)))
    # One transfer for all four integer arrays.
    flat = torch.tensor([*ids, *positions, *slots, *logit_rows], dtype=torch.int64).to(device)
    T = len(ids)
    return Layout(
        order=tuple(order),
        offsets=tuple(offsets),
        batch=TokenBatch(
            ids=flat[:T],
            positions=flat[T : 2 * T],
            slots=flat[2 * T : 3 * T],
            logit_rows=flat[3 * T :],
            groups=groups,
        ),
    )
