"""Which target a drafter was made for: some of its embeddings, in the drafter's ``config.json``.

Sizes alone let a drafter pass for any model of the same shape, and nothing would be wrong but the
speed. A fingerprint of the target's files would refuse too much: a copy in another dtype, or saved
by another library, is the same target. So 64 embedding entries are compared by correlation: near 1
for copies, quantised ones and fine-tunes included, near 0 for another training.

Shape legend: V target vocabulary, D target hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from cluster.errors import CheckpointError

KEY: Final = "target_probe"
"""In the configuration. Files without it, as other tools write them, are not checked."""
LEAST_CORRELATION: Final = 0.9
_NUM_ENTRIES: Final = 64


def probe(embeddings_VD: Tensor) -> list[float]:
    """64 entries spread over rows and columns, in bfloat16, so that no dtype makes a difference."""
    rows = torch.linspace(0, embeddings_VD.shape[0] - 1, _NUM_ENTRIES).long()
    columns = torch.arange(_NUM_ENTRIES) * 7 % embeddings_VD.shape[1]
    entries = embeddings_VD[rows.to(embeddings_VD.device), columns.to(embeddings_VD.device)]
    values: list[float] = entries.detach().to("cpu", torch.bfloat16).float().tolist()
    return values


def correlation(recorded: Sequence[float], found: Sequence[float]) -> float:
    """Of two probes: cosine of the angle between them, 1 for the same target, 0 if one is zero."""
    product = sum(a * b for a, b in zip(recorded, found, strict=True))
    size = math.hypot(*recorded) * math.hypot(*found)
    return product / size if size else 0.0


def read_probe(config: dict[str, Any]) -> list[float] | None:
    """The probe in a drafter's configuration, None if it has none.

    Raises:
        CheckpointError: something else than 64 finite numbers.
    """
    raw = config.get(KEY)
    if raw is None:
        return None
    if (
        not isinstance(raw, list)
        or len(raw) != _NUM_ENTRIES
        or not all(type(x) in (int, float) and math.isfinite(x) for x in raw)
    ):
        raise CheckpointError(f"{KEY}: expected {_NUM_ENTRIES} numbers")
    return [float(x) for x in raw]
