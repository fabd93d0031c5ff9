"""Configurations of drafters: what is read, and that everything else is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.drafter_config import parse_config
from cluster.errors import CheckpointError
from drafter_service.deepspec_format import deepspec_config
from tests.drafters import make_spec

# As speculators 0.9.0 writes it (`DSparkSpeculatorConfig.to_dict`, decoder section by Qwen3Config).
SPECULATORS: dict[str, Any] = {
    "architectures": ["DSparkSpeculator"],
    "aux_hidden_state_layer_ids": [2, 4],
    "block_size": 4,
    "confidence_head_with_markov": True,
    "draft_vocab_size": 60,
    "dtype": "float32",
    "enable_confidence_head": True,
    "markov_head_type": "vanilla",
    "markov_rank": 8,
    "mask_token_id": 59,
    "sample_from_anchor": True,
    "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dspark",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "accept_tolerance": 0.0,
                "proposal_type": "greedy",
                "speculative_tokens": 4,
                "verifier_accept_k": 1,
            }
        ],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "some/target"},
    },
    "speculators_model_type": "dspark",
    "speculators_version": "0.9.0",
    "target_hidden_size": None,
    "tie_word_embeddings": True,
    "transformer_layer_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 48,
        "layer_types": ["full_attention", "full_attention"],
        "max_position_embeddings": 512,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 60,
    },
    "transformers_version": "5.24.0",
}


def deepspec(**changes: Any) -> dict[str, Any]:
    return {**deepspec_config(make_spec()), **changes}


def speculators(decoder: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    section = {**SPECULATORS["transformer_layer_config"], **(decoder or {})}
    return {**SPECULATORS, "transformer_layer_config": section, **changes}


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != key}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head": "gated"},
        {"head": "rnn", "draft_vocab_size": 20},
        {"head": "none", "markov_rank": 0, "confidence_with_markov": False},
        {"has_confidence": False, "confidence_with_markov": False},
        {"sliding_windows": (None, 16), "causal_sliding_blocks": True},
        {"sample_from_anchor": False},
    ],
)
def test_deepspec_round_trip(changes: dict[str, Any]) -> None:
    spec = make_spec(**changes)
    assert parse_config(deepspec_config(spec)) == spec


def test_both_formats_describe_the_same_drafter() -> None:
    from_speculators = parse_config(speculators(), num_target_layers=6)
    # Causal blocks only matter in layers with a window, which neither has.
    assert from_speculators == make_spec(causal_sliding_blocks=True)


def test_speculators_does_not_record_the_targets_depth() -> None:
    assert parse_config(speculators()).num_target_layers == 5


def test_speculators_defaults() -> None:
    config = speculators()
    for key in ("sample_from_anchor", "markov_head_type", "enable_confidence_head", "markov_rank"):
        config = without(config, key)
    spec = parse_config(config)
    assert (spec.sample_from_anchor, spec.head, spec.has_confidence) == (True, "vanilla", True)
    assert spec.markov_rank == 256
    dflash = without(without(config, "confidence_head_with_markov"), "enable_confidence_head")
    spec = parse_config({**dflash, "speculators_model_type": "dflash"})
    assert (spec.sample_from_anchor, spec.head, spec.has_confidence) == (False, "none", False)
    assert (spec.gamma, spec.block_width, spec.markov_rank) == (3, 4, 0)


def test_old_rope_layout_and_missing_defaults() -> None:
    decoder = without(SPECULATORS["transformer_layer_config"], "rope_parameters")
    for key in ("head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act"):
        decoder = without(decoder, key)
    decoder |= {"rope_theta": 500.0, "rope_scaling": None}
    spec = parse_config({**SPECULATORS, "transformer_layer_config": decoder})
    assert (spec.rope_theta, spec.head_dim, spec.max_position_embeddings) == (500.0, 128, 32768)
    decoder |= {"model_type": "llama"}
    decoder = without(without(decoder, "use_sliding_window"), "max_window_layers")
    spec = parse_config({**SPECULATORS, "transformer_layer_config": decoder})
    assert (spec.head_dim, spec.max_position_embeddings) == (8, 2048)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": None}, (None, None)),
        ({"sliding_window": 16, "use_sliding_window": False}, (None, None)),
        ({"sliding_window": 16, "use_sliding_window": True}, (None, None)),  # by layer_types
        (
            {
                "sliding_window": 16,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (16, None),
        ),
        (
            {
                "sliding_window": 16,
                "use_sliding_window": True,
                "layer_types": None,
                "max_window_layers": 1,
            },
            (None, 16),
        ),
    ],
)
def test_windows(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert parse_config(deepspec(**changes)).sliding_windows == windows


REFUSED_DEEPSPEC: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["Gemma4DSparkModel"]}, "architectures"),
    ({"architectures": None}, "architectures"),
    ({"new_fangled_norm": True}, "new_fangled_norm: unknown key"),
    ({"quantization_config": {}}, "quantization_config: unknown key"),
    ({"hidden_size": None}, "hidden_size: missing"),
    ({"hidden_size": "32"}, "hidden_size: expected int"),
    ({"hidden_size": True}, "hidden_size: expected int"),
    ({"num_hidden_layers": 0}, "num_hidden_layers: 0"),
    ({"attention_bias": True}, "attention_bias"),
    ({"mlp_bias": True}, "mlp_bias"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_parameters.rope_type"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary"),
    ({"rope_parameters": {"rope_theta": -1.0}}, "rope_parameters.rope_theta"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
    ({"sliding_window": 0}, "sliding_window: 0"),
    ({"sliding_window": -1}, "sliding_window: -1 is negative"),
    ({"layer_types": ["full_attention"]}, "layer_types: expected 2"),
    ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types: 'chunked"),
    ({"layer_types": ["sliding_attention", "full_attention"]}, "without a window"),
    (
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 16,
            "use_sliding_window": False,
        },
        "without a window",
    ),
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"head_dim": 7}, "head_dim"),
    ({"mask_token_id": 60}, "mask_token_id"),
    ({"mask_token_id": None}, "mask_token_id: missing"),
    ({"block_size": 0}, "block_size"),
    ({"sample_from_anchor": False, "block_size": 1}, "block_size"),
    ({"sample_from_anchor": False, "markov_head_type": "rnn"}, "sample_from_anchor"),
    ({"max_position_embeddings": 5}, "max_position_embeddings: 5 has no room"),
    ({"markov_head_type": "fir"}, "markov_head_type"),
    ({"markov_head_type": None}, "markov_head_type"),
    ({"markov_rank": -1}, "markov_rank"),
    ({"markov_rank": 0}, "confidence_head_with_markov"),
    ({"confidence_head_with_markov": None}, "confidence_head_with_markov: missing"),
    ({"draft_vocab_size": 61}, "draft_vocab_size"),
    ({"target_hidden_size": 64}, "target_hidden_size"),
    ({"target_layer_ids": []}, "target_layer_ids"),
    ({"target_layer_ids": [1, 1]}, "target_layer_ids"),
    ({"target_layer_ids": [-1, 2]}, "target_layer_ids"),
    ({"target_layer_ids": [1, 6]}, "target_layer_ids: 6"),
    ({"target_layer_ids": [True, 2]}, "target_layer_ids"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED_DEEPSPEC)
def test_deepspec_refusals_name_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_config(deepspec(**changes))


REFUSED_SPECULATORS: list[tuple[dict[str, Any], str]] = [
    ({"speculators_model_type": "eagle3"}, "speculators_model_type: 'eagle3'"),
    ({"speculators_model_type": None}, "speculators_model_type: missing"),
    ({"conv_kernel_size": 2}, "conv_kernel_size: unknown key"),
    ({"transformer_layer_config": None}, "transformer_layer_config: missing"),
    ({"draft_vocab_size": None}, "draft_vocab_size: missing"),
    ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids"),
    ({"aux_hidden_state_layer_ids": [0, 3]}, "taps the embeddings"),
    ({"aux_hidden_state_layer_ids": [2, 6]}, "last hidden state"),
    ({"aux_hidden_state_layer_ids": [2, 7]}, "outside a target of 6"),
    ({"speculators_model_type": "dflash"}, "has no such head"),
    ({"decoder": {"attention_bias": True}}, "transformer_layer_config.attention_bias"),
    ({"decoder": {"hidden_act": "gelu"}}, "transformer_layer_config.hidden_act"),
    ({"decoder": {"model_type": "gpt_oss"}}, "transformer_layer_config.model_type"),
    ({"decoder": {"q_lora_rank": 4}}, "transformer_layer_config.q_lora_rank: unknown key"),
    (
        {"decoder": {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}},
        "transformer_layer_config.rope_parameters.full_attention",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED_SPECULATORS)
def test_speculators_refusals_name_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_config(speculators(**changes), num_target_layers=6)


def test_wrong_depth_names_both() -> None:
    with pytest.raises(CheckpointError, match="made for 6 layers, the target has 30"):
        parse_config(deepspec(), num_target_layers=30)
