"""What training needs of a model, whatever its architecture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor, nn


class DraftModelSpec(Protocol):
    """What training reads of a model's own description."""

    @property
    def gamma(self) -> int: ...

    @property
    def target_layer_ids(self) -> tuple[int, ...]: ...


class DraftModel(Protocol):
    """A `torch.nn.Module` that can be trained: parameters without gradient are the target's."""

    @property
    def spec(self) -> DraftModelSpec: ...

    @property
    def d2t(self) -> Tensor:
        """int64 [draft vocabulary]: target id of each draft id."""
        ...

    @property
    def lm_head(self) -> nn.Linear:
        """The target's head rows of the draft vocabulary, frozen."""
        ...

    @property
    def confidence_head(self) -> nn.Module | None: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
