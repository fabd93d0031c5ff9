"""Writing the DeepSpec format: its ``config.json``. The reader is `cluster.drafter_config`."""

from __future__ import annotations

from typing import Any

from cluster.drafter_spec import DrafterSpec
from cluster.errors import CheckpointError


def deepspec_config(spec: DrafterSpec) -> dict[str, Any]:
    """``config.json`` of the DeepSpec format for this drafter.

    Raises:
        CheckpointError: layers with different window sizes.
    """
    windows = {window for window in spec.sliding_windows if window is not None}
    if len(windows) > 1:
        raise CheckpointError(f"sliding_window: one value per checkpoint, not {sorted(windows)}")
    config: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel"],
        "attention_bias": False,
        "block_size": spec.block_width,
        "enable_confidence_head": spec.has_confidence,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "layer_types": [
            "full_attention" if window is None else "sliding_attention"
            for window in spec.sliding_windows
        ],
        "markov_rank": spec.markov_rank,
        "mask_token_id": spec.mask_token_id,
        "max_position_embeddings": spec.max_position_embeddings,
        "model_type": "qwen3",
        "num_attention_heads": spec.num_heads,
        "num_hidden_layers": spec.num_layers,
        "num_key_value_heads": spec.num_kv_heads,
        "num_target_layers": spec.num_target_layers,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_parameters": {"rope_theta": spec.rope_theta, "rope_type": "default"},
        "sliding_window": windows.pop() if windows else None,
        "target_layer_ids": list(spec.target_layer_ids),
        "tie_word_embeddings": False,
        "vocab_size": spec.vocab_size,
    }
    config["use_sliding_window"] = config["sliding_window"] is not None
    if spec.has_confidence:
        config["confidence_head_with_markov"] = spec.confidence_with_markov
    if spec.markov_rank:
        config["markov_head_type"] = spec.head
    if spec.draft_vocab_size != spec.vocab_size:
        config["draft_vocab_size"] = spec.draft_vocab_size
    if not spec.sample_from_anchor:
        config["sample_from_anchor"] = False
    if spec.causal_sliding_blocks:
        config["sliding_window_non_causal"] = False
    return config
