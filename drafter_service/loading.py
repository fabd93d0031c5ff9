"""From checkpoint folder to `DSparkModel` and back.

A drafter shares embeddings and LM head with its target: what the checkpoint leaves out is read
from the target's folder, and only that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from cluster import target_probe
from cluster.atomic_file import write_bytes
from cluster.checkpoint_checks import find_embeddings
from cluster.drafter_checkpoint import open_checkpoint, target_config, tensor_shapes
from cluster.drafter_spec import AutoregressiveSpec, DrafterSpec
from cluster.errors import CheckpointError
from cluster.tensor_file import write_tensors
from cluster.tensor_folder import TensorFolder
from drafter_service.autoregressive.model import AutoregressiveModel
from drafter_service.backbone import DSparkModel
from drafter_service.calibration.calibration_file import remove_stale_calibration
from drafter_service.deepspec_format import deepspec_config

_EMBEDDINGS: Final = "embed_tokens.weight"
_LM_HEAD: Final = "lm_head.weight"
_TARGET_LM_HEADS: Final = ("lm_head.weight", "language_model.lm_head.weight")


def load_drafter(
    checkpoint: Path,
    target: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> DSparkModel:
    """A drafter in eval mode, embeddings and LM head frozen.

    Args:
        checkpoint: a folder in the DeepSpec or the speculators format.
        target: the Hugging Face folder of the model that it drafts for.

    Raises:
        ModelNotFound: a folder, or a file that it must have, is missing.
        CheckpointError: the checkpoint cannot be honoured, or was made for another target.
    """
    opened = open_checkpoint(checkpoint, target)
    spec, source = opened.spec, opened.tensors
    weights = {name: source.get(name).to(device, dtype) for name in tensor_shapes(spec)}
    weights |= shared_weights(source, opened.d2t, spec, target, device=device, dtype=dtype)
    with torch.device("meta"):
        model = DSparkModel(spec)
    model.load_state_dict(weights, strict=True, assign=True)
    model.d2t = opened.d2t.to(device)
    model.embed_tokens.requires_grad_(False)
    model.lm_head.requires_grad_(False)
    return model.eval()


def save_drafter(model: DSparkModel, folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """Write a drafter in the DeepSpec format, without the target's embeddings and LM head.

    A calibration in the folder that was fitted to other weights is deleted.

    Args:
        folder: made if missing; each file is replaced at once, so a reader sees old or new.
        dtype: of the floating-point tensors; None keeps the model's own.

    Raises:
        CheckpointError: the format has no room for this drafter (two different window sizes).
        StorageFull: the disk is full; the file that was next is as it was.
    """
    config = deepspec_config(model.spec)
    write_checkpoint(model, tensor_shapes(model.spec), config, folder, dtype=dtype)


def shared_weights(
    source: TensorFolder,
    d2t: Tensor,
    spec: DrafterSpec | AutoregressiveSpec,
    target: Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Embeddings and LM head: the checkpoint's own where it brings them, else the target's.

    Raises:
        CheckpointError: the target lacks one that is needed, or has it in another size.
    """
    shared = TargetTensors(target, spec)
    weights = {}
    if _EMBEDDINGS in source:
        weights[_EMBEDDINGS] = source.get(_EMBEDDINGS).to(device, dtype)
    else:
        weights[_EMBEDDINGS] = shared.embeddings().to(device, dtype)
    if _LM_HEAD in source:
        weights[_LM_HEAD] = source.get(_LM_HEAD).to(device, dtype)
    elif _is_identity(d2t, spec) and shared.tied and _EMBEDDINGS not in source:
        weights[_LM_HEAD] = weights[_EMBEDDINGS]
    else:
        weights[_LM_HEAD] = shared.lm_head()[d2t].to(device, dtype)
    return weights


def write_checkpoint(
    model: DSparkModel | AutoregressiveModel,
    names: Iterable[str],
    config: dict[str, Any],
    folder: Path,
    *,
    dtype: torch.dtype | None,
) -> None:
    """Write these tensors of a model, its ``d2t`` where it needs one, and the configuration."""
    state = model.state_dict()
    tensors = {name: _stored(state[name], dtype) for name in names}
    if not _is_identity(model.d2t, model.spec):
        tensors["d2t"] = model.d2t.detach().to("cpu", torch.int64)
    config = {
        **config,
        "dtype": str(tensors["fc.weight"].dtype).removeprefix("torch."),
        target_probe.KEY: target_probe.probe(model.embed_tokens.weight),
    }
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    write_bytes(folder / "config.json", text.encode())
    remove_stale_calibration(folder)


def _is_identity(d2t: Tensor, spec: DrafterSpec | AutoregressiveSpec) -> bool:
    """Whether draft ids are target ids."""
    return spec.draft_vocab_size == spec.vocab_size and bool(
        (d2t == torch.arange(spec.vocab_size, device=d2t.device)).all()
    )


def _stored(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    tensor = tensor.detach().to("cpu", dtype or tensor.dtype)
    return tensor.contiguous().clone()


class TargetTensors:
    """The two tensors that a drafter shares with its target, read only if asked for."""

    def __init__(self, target: Path, spec: DrafterSpec | AutoregressiveSpec) -> None:
        self._path = target
        self._shape = (spec.vocab_size, spec.hidden_size)
        self._folder: TensorFolder | None = None

    @property
    def tied(self) -> bool:
        """Whether the target's LM head is its embeddings."""
        tied: bool = target_config(self._path).get("tie_word_embeddings", False) is True
        return tied and self._find(_TARGET_LM_HEADS) is None

    def embeddings(self) -> Tensor:
        """[V, D]."""
        return self._read(find_embeddings(self._tensors()), "embed_tokens.weight")

    def lm_head(self) -> Tensor:
        """[V, D]; of a tied target its embeddings."""
        name = self._find(_TARGET_LM_HEADS)
        if name is None and not self.tied:
            raise CheckpointError(
                f"{self._path} has no lm_head.weight, and its tie_word_embeddings is not true"
            )
        return self.embeddings() if name is None else self._read(name, "lm_head.weight")

    def _tensors(self) -> TensorFolder:
        if self._folder is None:
            self._folder = TensorFolder(self._path)
        return self._folder

    def _find(self, names: tuple[str, ...]) -> str | None:
        return next((name for name in names if name in self._tensors()), None)

    def _read(self, name: str | None, what: str) -> Tensor:
        if name is None:
            raise CheckpointError(f"{self._path} has no {what} for the drafter to share")
        tensor = self._tensors().get(name)
        if tuple(tensor.shape) != self._shape:
            raise CheckpointError(
                f"{self._path}: {name} has shape {tuple(tensor.shape)}, "
                f"the drafter needs {self._shape}"
            )
        return tensor
