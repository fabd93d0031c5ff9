"""From an autoregressive drafter's ``config.json`` to an `AutoregressiveSpec`, and back.

Two formats: our own, flat like DeepSpec's, and that of speculators (0.9.0,
``speculators_model_type`` ``eagle3``), which nests the decoder's configuration, counts tapped
layers one above the layer id, and keeps gamma among its proposal methods. Tensor names are the
same in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cluster.config_fields import Fields
from cluster.decoder_fields import (
    IRRELEVANT,
    MAX_POSITIONS,
    read_heads,
    read_layer_ids,
    read_rope_theta,
    refuse_unsupported,
)
from cluster.drafter_spec import AutoregressiveSpec
from cluster.target_probe import KEY

ARCHITECTURE: Final = "DSparkAutoregressiveModel"


def is_autoregressive(config: Mapping[str, Any]) -> bool:
    """Whether a drafter's configuration is one of ours for this architecture, or an EAGLE-3."""
    ours = config.get("architectures") == [ARCHITECTURE]
    return ours or config.get("speculators_model_type") == "eagle3"


def parse_autoregressive(
    config: Mapping[str, Any], *, num_target_layers: int | None = None
) -> AutoregressiveSpec:
    """The drafter that a ``config.json`` describes.

    Args:
        config: the parsed file, in either format.
        num_target_layers: layers of the target, if known. speculators does not record them: without
            this the spec carries the fewest that the tapped layers need.

    Raises:
        CheckpointError: a key is unknown, missing, malformed, or asks for what we cannot do.
    """
    top = Fields(config)
    if "speculators_model_type" in config:
        return _parse_speculators(top, num_target_layers)
    recorded = top.positive("num_target_layers")
    if num_target_layers not in (None, recorded):
        top.refuse(
            "num_target_layers",
            f"the drafter was made for {recorded} layers, the target has {num_target_layers}",
        )
    spec = _build(
        top,
        decoder=top,
        gamma=top.positive("block_size"),
        target_layer_ids=read_layer_ids(top, "target_layer_ids", offset=0, limit=recorded),
        num_target_layers=recorded,
        has_confidence=top.boolean("enable_confidence_head"),
        norms_heads=top.boolean("norms_heads"),
    )
    top.finish(IRRELEVANT | {KEY})
    return spec


def autoregressive_config(spec: AutoregressiveSpec) -> dict[str, Any]:
    """``config.json`` of our own format for this drafter."""
    return {
        "architectures": [ARCHITECTURE],
        "attention_bias": False,
        "block_size": spec.gamma,
        "draft_vocab_size": spec.draft_vocab_size,
        "enable_confidence_head": spec.has_confidence,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "norm_before_residual": spec.norm_before_residual,
        "norm_output": spec.norm_output,
        "norms_heads": spec.norms_heads,
        "num_attention_heads": spec.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": spec.num_kv_heads,
        "num_target_layers": spec.num_target_layers,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_parameters": {"rope_theta": spec.rope_theta, "rope_type": "default"},
        "target_layer_ids": list(spec.target_layer_ids),
        "vocab_size": spec.vocab_size,
    }


def _parse_speculators(top: Fields, num_target_layers: int | None) -> AutoregressiveSpec:
    decoder = top.section("transformer_layer_config")
    kind = decoder.text("model_type", "qwen3")
    if kind not in MAX_POSITIONS:
        decoder.refuse("model_type", f"{kind!r} is not supported")
    key = "eagle_aux_hidden_state_layer_ids"
    layer_ids = read_layer_ids(top, key, offset=1, limit=num_target_layers)
    if max(layer_ids) + 1 == num_target_layers:
        top.refuse(
            key,
            f"{num_target_layers} is the target's last hidden state, and the format does not say "
            "whether that is before or after its final norm",
        )
    for name in ("norm_before_fc", "fc_norm"):
        if top.boolean(name, False):
            top.refuse(name, "true is not supported")
    if decoder.boolean("use_sliding_window", False) or (
        kind == "llama" and decoder.has("sliding_window")
    ):
        decoder.refuse("sliding_window", "not supported for an autoregressive drafter")
    for name in ("sliding_window", "max_window_layers", "layer_types"):
        decoder.raw(name)  # without a window they mean nothing
    spec = _build(
        top,
        decoder=decoder,
        gamma=_proposed(top),
        target_layer_ids=layer_ids,
        # The last layer cannot be tapped (above), so there is one more than the highest tapped.
        num_target_layers=num_target_layers or max(layer_ids) + 2,
        has_confidence=False,
        norms_heads=kind == "qwen3",
    )
    top.raw("embed_requires_grad")
    provenance = {"speculators_model_type", "speculators_version", "tie_word_embeddings"}
    top.finish(IRRELEVANT | provenance)
    decoder.finish(IRRELEVANT | {"tie_word_embeddings"})
    return spec


def _proposed(top: Fields) -> int:
    """Gamma: what the first proposal method says."""
    methods = top.section("speculators_config").raw("proposal_methods")
    if not isinstance(methods, list) or not methods or not isinstance(methods[0], dict):
        top.refuse("speculators_config.proposal_methods", f"expected a list, got {methods!r}")
    return Fields(methods[0], "proposal_methods[0].").positive("speculative_tokens")


def _build(
    top: Fields,
    *,
    decoder: Fields,
    gamma: int,
    target_layer_ids: tuple[int, ...],
    num_target_layers: int,
    has_confidence: bool,
    norms_heads: bool,
) -> AutoregressiveSpec:
    """Read what both formats share, and check that it fits together."""
    hidden, vocab = decoder.positive("hidden_size"), decoder.positive("vocab_size")
    num_heads, num_kv_heads, head_dim = read_heads(decoder, hidden, qwen=norms_heads)
    refuse_unsupported(decoder)
    if (layers := decoder.positive("num_hidden_layers")) != 1:
        decoder.refuse("num_hidden_layers", f"{layers}, only 1 is supported")
    if top.raw("target_hidden_size") not in (None, hidden):
        top.refuse(
            "target_hidden_size",
            f"{top.raw('target_hidden_size')} differs from the drafter's hidden size {hidden}",
            hint="a drafter shares the target's embeddings, so the sizes must be equal",
        )
    draft_vocab = top.positive("draft_vocab_size")
    if draft_vocab > vocab:
        top.refuse("draft_vocab_size", f"{draft_vocab} exceeds the vocabulary of {vocab}")
    positions = decoder.positive(
        "max_position_embeddings", MAX_POSITIONS["qwen3" if norms_heads else "llama"]
    )
    if positions <= gamma + 1:
        decoder.refuse("max_position_embeddings", f"{positions} has no room for a block")
    return AutoregressiveSpec(
        hidden_size=hidden,
        intermediate_size=decoder.positive("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=decoder.number("rms_norm_eps", 1e-6),
        rope_theta=read_rope_theta(decoder),
        max_position_embeddings=positions,
        gamma=gamma,
        target_layer_ids=target_layer_ids,
        num_target_layers=num_target_layers,
        target_hidden_size=hidden,
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        has_confidence=has_confidence,
        norms_heads=norms_heads,
        norm_before_residual=top.boolean("norm_before_residual", False),
        norm_output=top.boolean("norm_output", False),
    )
