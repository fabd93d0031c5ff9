"""Writing the speculators format (PyPI package ``speculators``, 0.9.0): what it keeps, and how.

It differs from DeepSpec in four ways that are not mere names. Tapped layers are counted one higher;
``d2t`` holds offsets of rising ids; DSpark stores a reduced LM head and always takes embeddings and
full LM head from the target, EAGLE-3 stores both; and the target is recorded by name. The readers
are `cluster.drafter_config` and `cluster.autoregressive_config`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from cluster.drafter_spec import AutoregressiveSpec, DrafterSpec
from cluster.errors import CheckpointError

VERSION: Final = "0.9.0"
"""Of the package whose format this is; tests run against that one."""
_CLASSES: Final = {
    "dspark": "DSparkDraftModel",
    "dflash": "DFlashDraftModel",
    "eagle3": "Eagle3DraftModel",
}


@dataclass(frozen=True, kw_only=True)
class Verifier:
    """The target, as a checkpoint of this format records it."""

    name: str
    """Folder or hub id under which the package finds it."""
    architectures: tuple[str, ...]
    """As its ``config.json`` names them."""


def speculators_config(spec: DrafterSpec, verifier: Verifier) -> dict[str, Any]:
    """``config.json`` of a ``dspark`` or ``dflash`` speculator.

    Raises:
        CheckpointError: the format cannot express this drafter; names the field.
    """
    windows = {window for window in spec.sliding_windows if window is not None}
    assert len(windows) <= 1, "no format that we read has more"
    plain = spec.head == "none" and not spec.has_confidence
    kind = "dflash" if plain and not spec.sample_from_anchor else "dspark"
    decoder = {
        **_decoder_config(spec, "qwen3", spec.num_layers),
        "layer_types": [
            "full_attention" if window is None else "sliding_attention"
            for window in spec.sliding_windows
        ],
        "sliding_window": windows.pop() if windows else None,
        "use_sliding_window": any(window is not None for window in spec.sliding_windows),
    }
    config = {
        **_top_config(spec, kind, verifier, decoder),
        "aux_hidden_state_layer_ids": _counted_from_embeddings(spec),
        "block_size": spec.block_width,
        "mask_token_id": spec.mask_token_id,
        "sample_from_anchor": spec.sample_from_anchor,
        "sliding_window_non_causal": not spec.causal_sliding_blocks,
    }
    if kind == "dspark":
        config |= {
            "confidence_head_with_markov": spec.confidence_with_markov,
            "enable_confidence_head": spec.has_confidence,
            "markov_head_type": "vanilla" if spec.head == "none" else spec.head,
            "markov_rank": spec.markov_rank,
        }
    return config


def eagle3_config(spec: AutoregressiveSpec, verifier: Verifier) -> dict[str, Any]:
    """``config.json`` of an ``eagle3`` speculator.

    Raises:
        CheckpointError: the format cannot express this drafter; names the field.
    """
    decoder = _decoder_config(spec, "qwen3" if spec.norms_heads else "llama", 1)
    return {
        **_top_config(spec, "eagle3", verifier, decoder),
        "eagle_aux_hidden_state_layer_ids": _counted_from_embeddings(spec),
        "norm_before_residual": spec.norm_before_residual,
        "norm_output": spec.norm_output,
    }


def _top_config(
    spec: DrafterSpec | AutoregressiveSpec, kind: str, verifier: Verifier, decoder: dict[str, Any]
) -> dict[str, Any]:
    """What all kinds share."""
    proposal = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": spec.gamma,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": [_CLASSES[kind]],
        "draft_vocab_size": spec.draft_vocab_size,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "architectures": list(verifier.architectures),
                "name_or_path": verifier.name,
            },
        },
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "tie_word_embeddings": False,
        "transformer_layer_config": decoder,
    }


def _decoder_config(
    spec: DrafterSpec | AutoregressiveSpec, model_type: str, num_layers: int
) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "model_type": model_type,
        "num_attention_heads": spec.num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": spec.num_kv_heads,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_parameters": {"rope_theta": spec.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": spec.vocab_size,
    }


def _counted_from_embeddings(spec: DrafterSpec | AutoregressiveSpec) -> list[int]:
    """Tapped layers by index into transformers' ``hidden_states``."""
    last = max(spec.target_layer_ids)
    if last + 1 == spec.num_target_layers:
        raise CheckpointError(
            f"target_layer_ids: layer {last} is the target's last, and the speculators format does "
            "not say whether its output is meant before or after the final norm",
            hint="serve the checkpoint as it is; one for that library has to tap earlier layers "
            "(`dspark train --taps`)",
        )
    return [layer + 1 for layer in spec.target_layer_ids]


def in_rising_order(weights: dict[str, Tensor], d2t_W: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Reorder the draft vocabulary so that its target ids rise, as the package takes for granted
    wherever it indexes the target's LM head by ``t2d``.

    Args:
        weights: tensors of the drafter; those with a row per draft id are reordered.
        d2t_W: target id of each draft id.

    Returns:
        The tensors, and ``d2t`` sorted.
    """
    rising_W, order_W = d2t_W.sort()
    per_draft_id = {"lm_head.weight", "markov_head.markov_w2.weight"} & weights.keys()
    return weights | {name: weights[name][order_W] for name in per_draft_id}, rising_W


def vocabulary_maps(vocab_size: int, d2t_W: Tensor) -> dict[str, Tensor]:
    """``d2t`` (offsets, int64 [W]) and ``t2d`` (mask, bool [V]) of a reduced vocabulary."""
    marked_V = torch.zeros(vocab_size, dtype=torch.bool)
    marked_V[d2t_W] = True
    return {"d2t": d2t_W - torch.arange(len(d2t_W)), "t2d": marked_V}
