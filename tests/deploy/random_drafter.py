"""A drafter with random weights for any target: garbage drafts, which exactness must survive."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from cluster.drafter_spec import DrafterSpec
from drafter_service.backbone import DSparkModel
from drafter_service.loading import TargetTensors, save_drafter


def write_random_drafter(folder: Path, target: Path, *, gamma: int = 4, seed: int = 0) -> Path:
    """Save a one-layer drafter for ``target`` in ``folder`` and return it."""
    config = json.loads((target / "config.json").read_text())
    num_layers = config["num_hidden_layers"]
    spec = DrafterSpec(
        hidden_size=config["hidden_size"],
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        max_position_embeddings=2048 + gamma,
        gamma=gamma,
        mask_token_id=0,
        target_layer_ids=(num_layers // 2, num_layers - 1),
        num_target_layers=num_layers,
        target_hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        draft_vocab_size=config["vocab_size"],
        head="vanilla",
        markov_rank=8,
        has_confidence=True,
        confidence_with_markov=True,
        sliding_windows=(None,),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = DSparkModel(spec)
    with torch.no_grad():  # it is a drafter for this target, however bad
        model.embed_tokens.weight.copy_(TargetTensors(target, spec).embeddings())
    save_drafter(model, folder)
    return folder
