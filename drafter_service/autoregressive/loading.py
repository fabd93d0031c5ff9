"""From checkpoint folder to `AutoregressiveModel` and back."""

from __future__ import annotations

from pathlib import Path

import torch

from cluster.autoregressive_checkpoint import autoregressive_shapes, open_autoregressive
from cluster.autoregressive_config import autoregressive_config
from drafter_service.autoregressive.model import AutoregressiveModel
from drafter_service.loading import shared_weights, write_checkpoint


def load_autoregressive(
    checkpoint: Path,
    target: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> AutoregressiveModel:
    """A drafter in eval mode, embeddings and LM head frozen.

    Args:
        checkpoint: a folder in our own or the speculators format.
        target: the Hugging Face folder of the model that it drafts for; embeddings and LM head
            are read from it where the checkpoint leaves them out.

    Raises:
        ModelNotFound: a folder, or a file that it must have, is missing.
        CheckpointError: the checkpoint cannot be honoured, or was made for another target.
    """
    opened = open_autoregressive(checkpoint, target)
    spec, source = opened.spec, opened.tensors
    weights = {name: source.get(name).to(device, dtype) for name in autoregressive_shapes(spec)}
    weights |= shared_weights(source, opened.d2t, spec, target, device=device, dtype=dtype)
    with torch.device("meta"):
        model = AutoregressiveModel(spec)
    model.load_state_dict(weights, strict=True, assign=True)
    model.d2t = opened.d2t.to(device)
    model.embed_tokens.requires_grad_(False)
    model.lm_head.requires_grad_(False)
    return model.eval()


def save_autoregressive(
    model: AutoregressiveModel, folder: Path, *, dtype: torch.dtype | None = None
) -> None:
    """Write a drafter in our own format, without the target's embeddings and LM head.

    A calibration in the folder that was fitted to other weights is deleted.

    Args:
        folder: made if missing; each file is replaced at once, so a reader sees old or new.
        dtype: of the floating-point tensors; None keeps the model's own.
    """
    names = autoregressive_shapes(model.spec)
    write_checkpoint(model, names, autoregressive_config(model.spec), folder, dtype=dtype)
