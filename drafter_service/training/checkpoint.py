"""The state of a run on disk: one file, replaced whole, from which training goes on exactly.

Batches are a pure function of the seed and the step, so there is no random state to keep.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from cluster.errors import CheckpointError
from cluster.fingerprint import folder_fingerprint
from cluster.tensor_file import write_torch
from drafter_service.training.config import TrainConfig
from drafter_service.training.draft_model import DraftModel
from drafter_service.training.optimiser import Optimiser
from drafter_service.training.progress import LearningCurve

_NAME = "state.pt"


def run_identity(config: TrainConfig, target: str, data: str) -> str:
    """Digest of all that decides the loss curve; a checkpoint resumes only under the same.

    Under a time budget the clock decides too, and so does where the budget ends: that is not part.
    """
    shape = asdict(config.shape)
    if config.shape.kind == "dspark":
        del shape["kind"]  # there was no other when the first checkpoints were written
    decides: dict[str, Any] = {
        "shape": shape,
        "schedule": asdict(config.schedule),
        "loss": asdict(config.loss),
        "seed": config.seed,
        "held_out": config.num_held_out,
        "sequences": config.max_sequences,
        "precision": config.precision,
        "target": target,
        "data": data,
    }
    if config.start_from is not None:
        decides["start_from"] = folder_fingerprint(config.start_from)
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def trainable(model: DraftModel) -> dict[str, torch.Tensor]:
    """The drafter's own weights: everything but what it shares with the target."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def save_state(
    work: Path,
    *,
    identity: str,
    steps_done: int,
    model: DraftModel,
    optimiser: Optimiser,
    curve: LearningCurve,
    elapsed_s: float,
) -> None:
    """Replace the checkpoint.

    Raises:
        StorageFull: no room; the previous checkpoint stands.
    """
    write_torch(
        work / _NAME,
        {
            "identity": identity,
            "steps_done": steps_done,
            "model": {name: p.detach() for name, p in trainable(model).items()},
            "optimiser": optimiser.inner.state_dict(),
            "curve": curve.to_json(),
            "elapsed_s": elapsed_s,
        },
    )


def load_state(
    work: Path, *, identity: str, model: DraftModel, optimiser: Optimiser
) -> tuple[int, LearningCurve, float]:
    """Restore model and optimiser in place.

    Returns:
        (steps done, curve, seconds spent); (0, empty, 0) for a new run.

    Raises:
        CheckpointError: the checkpoint is broken or belongs to a run with other settings.
    """
    path = work / _NAME
    if not path.is_file():
        return 0, LearningCurve(), 0.0
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", hint="delete it") from error
    if state.get("identity") != identity:
        raise CheckpointError(
            f"{path} belongs to a run with other settings, data or target",
            hint="use another work folder, or delete this file to start over",
        )
    own = trainable(model)
    with torch.no_grad():
        for name, value in state["model"].items():
            own[name].copy_(value)
    optimiser.inner.load_state_dict(state["optimiser"])
    # Checkpoints of the first release do not say how long they took.
    elapsed_s = state.get("elapsed_s", 0.0)
    return state["steps_done"], LearningCurve.from_json(state["curve"]), elapsed_s
