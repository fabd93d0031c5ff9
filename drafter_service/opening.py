"""Any drafter, opened by what it is made of: a checkpoint of some architecture, or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

import torch

from cluster.config import DrafterConfig
from cluster.drafter_checkpoint import checkpoint_kind, target_config
from cluster.drafter_spec import NGRAM, DrafterSource
from cluster.errors import CheckpointError
from drafter_service.autoregressive.engine import AutoregressiveEngine
from drafter_service.autoregressive.loading import load_autoregressive
from drafter_service.calibration.calibration import Calibration
from drafter_service.calibration.calibration_file import load_calibration
from drafter_service.drafter import Drafter
from drafter_service.engine import DraftEngine
from drafter_service.loading import load_drafter
from drafter_service.prompt_lookup import PromptLookup

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class _Options(TypedDict):
    """What all engines with weights take."""

    max_sessions: int
    max_session_tokens: int
    idle_session_s: float
    q_top_k: int
    calibration: Calibration | None
    max_pending_bytes: int


def open_drafter(
    source: DrafterSource,
    target: Path,
    config: DrafterConfig,
    *,
    device: torch.device | str = "cpu",
    calibrated: bool = True,
) -> Drafter:
    """A drafter ready to run, with the bounds that ``config`` sets.

    Args:
        source: a checkpoint folder (DSpark, DFlash, or autoregressive), or ``ngram``.
        target: the Hugging Face folder of the model that it drafts for.
        device: where it computes; prompt lookup always runs on the CPU.
        calibrated: whether a calibration beside the checkpoint is applied to its confidence.

    Raises:
        ModelNotFound: a folder, or a file that it must have, is missing.
        CheckpointError: the checkpoint cannot be honoured, or was made for another target.
    """
    if source == NGRAM:
        return _open_lookup(target, config)
    assert isinstance(source, Path)
    device = torch.device(device)
    dtype = _dtype(config.dtype, device)
    options = _Options(
        max_sessions=config.max_sessions,
        max_session_tokens=config.max_session_tokens,
        idle_session_s=config.idle_session_s,
        q_top_k=config.q_top_k,
        calibration=load_calibration(source) if calibrated else None,
        max_pending_bytes=config.max_pending_bytes,
    )
    if checkpoint_kind(source) == "autoregressive":
        model = load_autoregressive(source, target, device=device, dtype=dtype)
        return AutoregressiveEngine(model, **options)
    return DraftEngine(load_drafter(source, target, device=device, dtype=dtype), **options)


def _open_lookup(target: Path, config: DrafterConfig) -> PromptLookup:
    return PromptLookup(
        config.lookup,
        vocab_size=_size(target, "vocab_size"),
        max_positions=_size(target, "max_position_embeddings"),
        max_sessions=config.max_sessions,
        max_session_tokens=config.max_session_tokens,
        idle_session_s=config.idle_session_s,
        max_pending_bytes=config.max_pending_bytes,
    )


def _size(target: Path, name: str) -> int:
    size = target_config(target).get(name)
    if not isinstance(size, int) or size < 1:
        raise CheckpointError(f"{name}: {size!r} in {target / 'config.json'}")
    return size


def _dtype(name: str, device: torch.device) -> torch.dtype:
    """Weights of the drafter: ``auto`` is fp32 on a CPU and bf16 elsewhere."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _DTYPES[name]
