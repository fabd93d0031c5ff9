"""Running a step's spans through the model and judging what they sample.

Shape legend: M tokens whose logits are wanted, V vocabulary, T tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verifier_service.acceptance import RowVerdict, VerifyRow, accept
from verifier_service.torch_engine.attention import Span
from verifier_service.torch_engine.batch import lay_out
from verifier_service.torch_engine.kv import KVCache
from verifier_service.torch_engine.model import TargetModel


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What is known of each span, by its index."""

    verdicts: dict[int, RowVerdict]
    """Of the spans that had a row to judge."""
    broken: frozenset[int]
    """Spans whose numbers are not finite. They are not judged."""
    offsets: tuple[int, ...]
    """First row of each span in ``features``."""
    features: Tensor | None
    """Outputs of the tapped layers for all tokens of the batch."""


def compute(
    model: TargetModel,
    cache: KVCache,
    taps: Sequence[int],
    spans: Sequence[Span],
    rows: Sequence[VerifyRow | None],
) -> Computed:
    """One forward over at least one span.

    Args:
        rows: for each span what to judge its logits by; None where nothing is sampled.
    """
    layout = lay_out(spans, model)
    output = model.forward(layout.batch, cache, taps)
    broken = _broken(spans, layout.offsets, output.finite)
    logits_MV = output.logits
    if broken:
        good = [i not in broken for i in layout.order for _ in range(spans[i].num_logits)]
        logits_MV = logits_MV[torch.tensor(good, device=logits_MV.device)]
    judged = [i for i in layout.order if rows[i] is not None and i not in broken]
    verdicts = accept(logits_MV, [row for i in judged if (row := rows[i]) is not None])
    return Computed(
        verdicts=dict(zip(judged, verdicts, strict=True)),
        broken=broken,
        offsets=layout.offsets,
        features=output.features,
    )


def _broken(spans: Sequence[Span], offsets: Sequence[int], finite_T: Tensor) -> frozenset[int]:
    """Spans with a token whose hidden state is not finite."""
    if bool(finite_T.all()):
        return frozenset()
    finite = finite_T.tolist()
    return frozenset(
        index
        for index, (span, first) in enumerate(zip(spans, offsets, strict=True))
        if not all(finite[first : first + len(span.ids)])
    )
