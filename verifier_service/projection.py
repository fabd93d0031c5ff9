"""``hidden_norm(fc(features))``: what a verifier ships instead of raw features (paper equation 2).

An autoregressive drafter norms what it gets by itself, so for it only ``fc`` is applied.

Shape legend: T committed rows, F raw feature width (tapped layers side by side), D draft hidden
size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from cluster.drafter_checkpoint import Projection, load_projection


class Projects(Protocol):
    """What an engine makes of the layers it taps before it hands them out."""

    target_layer_ids: tuple[int, ...]

    def __call__(self, features_TF: Tensor) -> Tensor:
        """[T, F], tapped layers side by side, to the rows that are handed out."""
        ...


class FeatureProjection:
    """The drafter's projection tensors on the verifier's device."""

    def __init__(
        self, projection: Projection, *, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        self.target_layer_ids = projection.target_layer_ids
        self.hidden_size = projection.hidden_size
        self._fc = projection.fc.to(device, dtype)
        norm = projection.hidden_norm
        self._norm = None if norm is None else norm.to(device, torch.float32)
        self._eps = projection.rms_norm_eps

    def __call__(self, features_TF: Tensor) -> Tensor:
        """[T, F] -> [T, D] in the dtype of the projection; the norm is computed in fp32."""
        x_TD = functional.linear(features_TF.to(self._fc.dtype), self._fc)
        if self._norm is None:
            return x_TD
        normed = functional.rms_norm(x_TD.float(), x_TD.shape[-1:], self._norm, self._eps)
        return normed.to(self._fc.dtype)


def load_feature_projection(
    drafter: Path, target: Path, *, device: torch.device, dtype: torch.dtype
) -> FeatureProjection:
    """Read the projection of a drafter folder, checked against the target that it must fit.

    Raises:
        ModelNotFound: no such folder.
        CheckpointError: not a drafter for this target; names the field.
    """
    return FeatureProjection(load_projection(drafter, target), device=device, dtype=dtype)
