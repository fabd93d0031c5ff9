"""Training features from an engine that decodes: what it computed anyway, kept per request.

Shape legend: T committed rows, F raw feature width (tapped layers side by side), D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from drafter_service.training.features import feature_sequence
from drafter_service.training.shards import FeatureSequence
from verifier_service.engine import CommittedRows


class RawRows:
    """In the place of a drafter's projection: tapped layers and last hidden state as they are."""

    def __init__(self, target_layer_ids: Sequence[int], num_layers: int) -> None:
        # The engine reports the last layer after the final norm: what the head reads.
        self.target_layer_ids = (*target_layer_ids, num_layers - 1)

    def __call__(self, features_TF: Tensor) -> Tensor:
        """[T, F + D], unchanged."""
        return features_TF


class KeptRows:
    """Rows of requests in hand, rounded as they are stored.

    Args:
        hidden_size: of the target; the width of the last hidden state in the engine's rows.
        logits: the target's head, [n, D] -> [n, V] in fp32.
    """

    def __init__(self, hidden_size: int, logits: Callable[[Tensor], Tensor]) -> None:
        self._hidden_size = hidden_size
        self._logits = logits
        self._rows: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def add(self, rows: CommittedRows) -> None:
        """Keep what a step committed for a request; the engine must project by `RawRows`."""
        assert rows.features is not None, "the engine taps nothing"
        width = rows.features.shape[1] - self._hidden_size
        features_TF, hidden_TD = torch.split(rows.features, [width, self._hidden_size], dim=1)
        kept = (features_TF.bfloat16(), hidden_TD.half())
        self._rows.setdefault(rows.rid, []).append(kept)

    def take(self, rid: int, ids: Sequence[int], num_prompt: int) -> FeatureSequence:
        """The whole sequence of a request that has ended; it is forgotten here."""
        features, hidden = (torch.cat(parts) for parts in zip(*self._rows.pop(rid), strict=True))
        # The last token was sampled, not computed: nothing reads its row.
        return feature_sequence(
            ids,
            num_prompt,
            torch.cat([features, features.new_zeros(1, features.shape[1])]),
            torch.cat([hidden, hidden.new_zeros(1, hidden.shape[1])]),
            self._logits,
        )

    def clear(self) -> None:
        """Forget every request."""
        self._rows.clear()
