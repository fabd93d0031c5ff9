"""What configurations of all drafter architectures share: the fields of a transformer decoder."""

from __future__ import annotations

from typing import Final

from cluster.config_fields import Fields

IRRELEVANT: Final = frozenset(
    {
        # who wrote the file, and how transformers shall run it
        "architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "auto_map",
        "_name_or_path", "name_or_path", "_attn_implementation", "_attn_implementation_autoset",
        "attn_implementation", "return_dict", "output_hidden_states", "output_attentions",
        "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "problem_type",
        # training
        "initializer_range", "attention_dropout", "num_anchors", "max_anchors", "pretraining_tp",
        # generation, which is not the drafter's business
        "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id",
    }
)  # fmt: skip
"""Keys that do not change what a drafter computes."""
MAX_POSITIONS: Final = {"qwen3": 32768, "llama": 2048}
"""``max_position_embeddings`` where transformers left the class's default out of the file."""


def read_heads(decoder: Fields, hidden: int, *, qwen: bool) -> tuple[int, int, int]:
    """Query heads, key/value heads, head dimension."""
    heads = decoder.positive("num_attention_heads")
    kv_heads = decoder.positive("num_key_value_heads", heads)
    if heads % kv_heads:
        decoder.refuse("num_key_value_heads", f"{kv_heads} does not divide {heads} query heads")
    head_dim = decoder.positive("head_dim", 128 if qwen else hidden // heads)
    if head_dim % 2:
        decoder.refuse("head_dim", f"{head_dim} is odd, rotary positions need pairs")
    return heads, kv_heads, head_dim


def refuse_unsupported(decoder: Fields) -> None:
    """Refuse another activation than SiLU, and biases."""
    if decoder.text("hidden_act", "silu") != "silu":
        decoder.refuse("hidden_act", f"{decoder.raw('hidden_act')!r}, only 'silu' is supported")
    for key in ("attention_bias", "mlp_bias"):
        if decoder.boolean(key, False):
            decoder.refuse(key, "true is not supported")


def read_rope_theta(decoder: Fields) -> float:
    """Base of plain rotary positions, in transformers' new (``rope_parameters``) or old layout."""
    scaling = decoder.raw("rope_scaling")
    if scaling not in (None, {}, {"rope_type": "default"}):
        decoder.refuse("rope_scaling", f"{scaling!r} is not supported, only null is")
    theta = decoder.number("rope_theta", 10000.0)
    if not decoder.has("rope_parameters"):
        return theta
    rope = decoder.section("rope_parameters")
    if rope.text("rope_type", "default") != "default":
        rope.refuse("rope_type", f"{rope.raw('rope_type')!r}, only 'default' is supported")
    theta = rope.number("rope_theta", theta)
    rope.finish()
    return theta


def read_layer_ids(top: Fields, key: str, *, offset: int, limit: int | None) -> tuple[int, ...]:
    """Tapped target layers, written ``offset`` too high, below ``limit``."""
    listed = top.integers(key)
    if len(set(listed)) != len(listed):
        top.refuse(key, f"{listed} names a layer twice")
    layer_ids = tuple(number - offset for number in listed)
    if min(layer_ids) < 0:
        top.refuse(key, f"{min(listed)} taps the embeddings, which is not supported")
    if limit is not None and max(layer_ids) >= limit:
        top.refuse(key, f"{max(listed)} is outside a target of {limit} layers")
    return layer_ids
