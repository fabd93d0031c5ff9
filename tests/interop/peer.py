"""The `speculators` package at work: drafters that it writes, and blocks that it computes.

Blocks come from the package's own ``forward``, the only one that it has: over a packed sequence,
with chosen anchors, and with the tokens after each anchor given. It hands its logits to the loss
and returns neither, so they are caught there.

Shape legend: N blocks, G draft tokens of a block, W draft vocabulary, T positions, F raw feature
width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter_service.backbone import DSparkModel
from tests.drafters import write_target

speculators = pytest.importorskip(
    "speculators", reason="needs the speculators package: `make test-interop` installs and runs it"
)
dspark_core = pytest.importorskip("speculators.models.dspark.core")
eagle3_core = pytest.importorskip("speculators.models.eagle3.core")
dflash_core = pytest.importorskip("speculators.models.dflash.core")
proposals = pytest.importorskip("speculators.proposals.greedy")
trainer = pytest.importorskip("speculators.train.cli")
converter = pytest.importorskip("speculators.convert.dflash.converter")

_CONFIGS = {
    "dspark": speculators.DSparkSpeculatorConfig,
    "dflash": speculators.DFlashSpeculatorConfig,
    "eagle3": speculators.Eagle3SpeculatorConfig,
}
_MODELS = {
    "dspark": speculators.DSparkDraftModel,
    "dflash": speculators.DFlashDraftModel,
    "eagle3": speculators.Eagle3DraftModel,
}


@dataclass(frozen=True, kw_only=True)
class PeerBlocks:
    """What the package computes for the slots that predict."""

    logits: Tensor
    """[N, G, W]."""
    confidence: Tensor | None
    """[N, G], logits of the confidence head."""


def whole_target(folder: Path, model: DSparkModel, **changes: Any) -> Path:
    """A target as the package wants it: with a final norm, and a model type that it knows."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    write_target(folder, model, **{"model_type": "llama", **sizes, **rope, **changes})
    path = folder / "model.safetensors"
    norm = torch.rand(model.spec.hidden_size) + 0.5
    save_file({**load_file(path), "model.norm.weight": norm}, path)
    return folder


def write_drafter(folder: Path, target: Path, decoder: Any, kind: str, **changes: Any) -> Any:
    """Have the package build a drafter with random weights and save it.

    Args:
        decoder: transformers' configuration of the drafter's layers.
        kind: ``dspark``, ``dflash`` or ``eagle3``.
        changes: fields of the package's configuration.
    """
    decoder._attn_implementation = "eager"  # the package's choice for devices without flex
    of_kind = {"block_size": 4, "aux_hidden_state_layer_ids": [2, 4], "mask_token_id": 59}
    if kind == "dspark":
        of_kind["markov_rank"] = 8
    elif kind == "eagle3":
        of_kind = {"eagle_aux_hidden_state_layer_ids": [2, 4]}
    fields = {"draft_vocab_size": decoder.vocab_size, **of_kind, **changes}
    proposal = proposals.GreedyTokenProposalConfig(speculative_tokens=4)
    config = _CONFIGS[kind](
        transformer_layer_config=decoder,
        speculators_config=speculators.SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=speculators.VerifierConfig.from_pretrained(str(target)),
        ),
        **fields,
    )
    torch.manual_seed(5)
    model = _MODELS[kind](config)
    if fields["draft_vocab_size"] != decoder.vocab_size:
        model.load_vocab_mappings(*_kept_ids(decoder.vocab_size, fields["draft_vocab_size"]))
    model.load_verifier_weights()
    _save_random(model, folder)
    return model


def begin_training(folder: Path, target: Path, architecture: str, kind: str) -> Any:
    """A drafter as the package's trainer sets it up by default, but for sizes: every layer but the
    last has a window. Saved with random weights.

    Args:
        architecture: of the decoder layers, ``llama`` or ``qwen3``.
    """
    decoder = trainer.create_transformer_layer_config(
        str(target),
        num_layers=2,
        draft_arch=architecture,
        hidden_act=None,
        sliding_window=9,
        full_attention_indices=[1],
    )
    torch.manual_seed(6)
    t2d, d2t = _kept_ids(decoder.vocab_size, 20)
    model = _MODELS[kind].from_training_args(
        verifier_config=decoder,
        t2d=t2d,
        d2t=d2t,
        verifier_name_or_path=str(target),
        draft_attn_impl="eager",
        draft_vocab_size=20,
        block_size=4,
        mask_token_id=59,
        markov_rank=8,
        target_layer_ids=[2, 4],
    )
    _save_random(model, folder)
    return model


def tapped_layers(deepspec: dict[str, Any], target: Path) -> list[int]:
    """What the package's converter makes of the layers that a DFlash checkpoint taps."""
    own = {"target_layer_ids": deepspec["target_layer_ids"], "mask_token_id": 59}
    converted = converter.DFlashConverter()._build_config(
        {**deepspec, "dflash_config": own}, str(target), None
    )
    layers: list[int] = converted.aux_hidden_state_layer_ids
    return layers


def _kept_ids(vocab_size: int, draft_vocab_size: int) -> tuple[Tensor, Tensor]:
    """The package's two maps for random target ids: which are kept, and their offsets."""
    kept = torch.randperm(vocab_size)[:draft_vocab_size].sort().values
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[kept] = True
    return t2d, kept - torch.arange(draft_vocab_size)


def _save_random(model: Any, folder: Path) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if "norm" in name:  # random too, or a norm that is skipped would go unseen
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)


def open_drafter(folder: Path) -> Any:
    """Load a saved drafter as the package does, in fp32 and with dense attention."""
    config = speculators.SpeculatorModelConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    return speculators.SpeculatorModel.from_pretrained(
        str(folder), config=config, dtype=torch.float32
    ).eval()


@torch.inference_mode()
def blocks(
    monkeypatch: pytest.MonkeyPatch,
    model: Any,
    features_TF: Tensor,
    anchors: Sequence[int],
    anchor_ids: Sequence[int],
    drafts_NG: Tensor,
) -> PeerBlocks:
    """Run the package's forward over one sequence.

    Args:
        features_TF: raw features of the target, as many rows as the sequence has positions.
        anchors: rising positions, further apart than a block and its successor.
        anchor_ids: the tokens at them.
        drafts_NG: the tokens after them, target ids.
    """
    caught: dict[str, Any] = {}
    dspark = isinstance(model, speculators.DSparkDraftModel)
    module = dspark_core if dspark else dflash_core

    def catch(logits: Tensor, targets: Tensor, *rest: Any, **unused: Any) -> Any:
        caught.update(logits=logits, confidence=rest[0] if dspark else None)
        return None, {}  # the loss itself needs Triton, and nobody looks at it

    monkeypatch.setattr(module, "compute_metrics", catch)
    length, num = len(features_TF), len(anchors)
    ids, chosen = torch.zeros(1, length, dtype=torch.long), torch.zeros(1, length)
    for anchor, anchor_id, drafts_G in zip(anchors, anchor_ids, drafts_NG, strict=True):
        chosen[0, anchor] = 1
        ids[0, anchor] = anchor_id
        ids[0, anchor + 1 : anchor + 1 + len(drafts_G)] = drafts_G
    model(
        hidden_states=features_TF[None],
        input_ids=ids,
        loss_mask=chosen,
        verifier_last_hidden_states=torch.zeros(1, length, model.hidden_size),
        document_ids=torch.zeros(1, length, dtype=torch.long),
        max_anchors=num,
    )
    skipped = 0 if model.config.sample_from_anchor else 1
    confidence = caught["confidence"]
    return PeerBlocks(
        logits=caught["logits"].view(num, model.block_size, -1)[:, skipped:],
        confidence=(
            None if confidence is None else confidence.view(num, model.block_size)[:, skipped:]
        ),
    )


@torch.inference_mode()
def rollout(
    monkeypatch: pytest.MonkeyPatch, model: Any, features_TF: Tensor, ids: Sequence[int], gamma: int
) -> Tensor:
    """Run the package's EAGLE-3 forward behind one text; logits [G, W] of its draft slots.

    Args:
        features_TF: raw features of the target, at least as many rows as ``ids``.
        ids: the text, and behind it the tokens that were drafted.
        gamma: how many of ``ids`` those are.
    """
    steps: list[Tensor] = []

    def catch(logits: Tensor, *unused: Any, **named: Any) -> tuple[Tensor, dict[str, Any]]:
        steps.append(logits)
        return torch.zeros(()), {}

    monkeypatch.setattr(eagle3_core, "compute_metrics", catch)
    # As the package shifts a batch: row i pairs the feature at i with the id at i + 1.
    length = len(ids) - 1
    model(
        hidden_states=features_TF[None, :length],
        input_ids=torch.tensor([ids[1:]]),
        document_ids=torch.zeros(1, length, dtype=torch.long),
        verifier_last_hidden_states=torch.zeros(1, length, model.hidden_size),
        ttt_steps=gamma,
    )
    row = len(ids) - gamma - 2  # pairs the last committed feature with the anchor's id
    return torch.stack([logits[0, row] for logits in steps])
