"""Which kind of drafter is trained: the one place where training knows about architectures.

Data, packs, objective, optimiser, checkpoints and curves are the same for all kinds. A kind adds
an `Architecture`: how a model starts, how it runs over a pack, how it is exported.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from drafter_service.backbone import DSparkModel
from drafter_service.loading import load_drafter, save_drafter
from drafter_service.training.autoregressive import AutoregressiveArchitecture
from drafter_service.training.config import DrafterKind, DrafterShape
from drafter_service.training.draft_model import DraftModel
from drafter_service.training.initialisation import check_shape, drafter_spec, initial_model
from drafter_service.training.loss import BlockOutput, block_output
from drafter_service.training.packing import Pack
from drafter_service.training.target import Target


@dataclass(frozen=True, kw_only=True)
class Start:
    """What is settled before the first step: by the configuration, and by the training data."""

    shape: DrafterShape
    mask_token_id: int
    """An id that replies do not use."""
    d2t: Tensor
    """int64 [draft vocabulary], rising."""
    bigrams: Tensor
    """int64 [M, 2]: neighbours in the replies, (target id, draft id)."""
    seed: int


class Architecture(Protocol):
    """One kind of drafter. The model type is the kind's own."""

    def initial_model(self, target: Target, start: Start) -> DraftModel:
        """A model on the target's device. The same start always gives the same weights.

        Raises:
            ConfigError: the shape does not fit the target.
            CheckpointError: the target has a feature that this kind lacks.
        """
        ...

    def load(self, checkpoint: Path, target: Target, shape: DrafterShape) -> DraftModel:
        """A drafter that exists, in fp32 on the target's device, to be trained further.

        Raises:
            ModelNotFound, CheckpointError: no drafter of this kind for this target.
            ConfigError: not of this shape; names what differs.
        """
        ...

    def block_output(self, model: Any, batch: Pack) -> BlockOutput:
        """Run over a pack, teacher-forced; differentiable, without side effects."""
        ...

    def save(self, model: Any, folder: Path, dtype: torch.dtype) -> None:
        """Export. Files are replaced whole: a reader sees the old drafter or the new one."""
        ...


class DSparkArchitecture:
    """DSpark, and DFlash where there is no sequential head (paper sections 2.2 and 3.1)."""

    def initial_model(self, target: Target, start: Start) -> DSparkModel:
        """See `Architecture.initial_model`."""
        spec = drafter_spec(target, start.shape, start.mask_token_id)
        return initial_model(spec, target, start.d2t, start.bigrams, start.seed)

    def load(self, checkpoint: Path, target: Target, shape: DrafterShape) -> DSparkModel:
        """See `Architecture.load`."""
        model = load_drafter(checkpoint, target.path, device=target.device)
        check_shape(model.spec, drafter_spec(target, shape, model.spec.mask_token_id), checkpoint)
        return model.train()

    def block_output(self, model: DSparkModel, batch: Pack) -> BlockOutput:
        """See `Architecture.block_output`."""
        return block_output(model, batch)

    def save(self, model: DSparkModel, folder: Path, dtype: torch.dtype) -> None:
        """See `Architecture.save`."""
        save_drafter(model, folder, dtype=dtype)


def architecture_of(kind: DrafterKind) -> Architecture:
    """The architecture that ``kind`` names."""
    return _ARCHITECTURES[kind]


_ARCHITECTURES: dict[DrafterKind, Architecture] = {
    "dspark": DSparkArchitecture(),
    "autoregressive": AutoregressiveArchitecture(),
}
