"""From a drafter's ``config.json`` to a `DrafterSpec`: the DeepSpec and the speculators formats.

DeepSpec (the paper's reference code) writes one flat Qwen3 configuration with the drafter's own
keys beside it; our reduced vocabulary adds ``draft_vocab_size`` to it. speculators (0.9.0,
``speculators_model_type`` ``dspark`` or ``dflash``) nests the decoder's configuration in
``transformer_layer_config``, and counts tapped layers in ``aux_hidden_state_layer_ids`` as
transformers' ``hidden_states`` does: one above the layer id.
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
from cluster.drafter_spec import DrafterSpec, HeadKind
from cluster.target_probe import KEY

_HEADS: Final[dict[str, HeadKind]] = {"vanilla": "vanilla", "gated": "gated", "rnn": "rnn"}


def parse_config(config: Mapping[str, Any], *, num_target_layers: int | None = None) -> DrafterSpec:
    """The drafter that a ``config.json`` describes.

    Args:
        config: the parsed file, in either format.
        num_target_layers: layers of the target, if known. speculators does not record them: without
            this the spec carries the fewest that the tapped layers need.

    Raises:
        CheckpointError: a key is unknown, missing, malformed, or asks for what we cannot do.
    """
    if is_speculators(config):
        return _parse_speculators(Fields(config), num_target_layers)
    return _parse_deepspec(Fields(config), num_target_layers)


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is in the speculators format."""
    return "speculators_model_type" in config or "speculators_config" in config


def _parse_deepspec(top: Fields, num_target_layers: int | None) -> DrafterSpec:
    architectures = top.raw("architectures")
    if architectures != ["Qwen3DSparkModel"]:
        top.refuse(
            "architectures",
            f"{architectures!r} is not a DSpark drafter that we can run",
            hint="expected ['Qwen3DSparkModel'], or a speculators checkpoint (dspark, dflash)",
        )
    if top.boolean("tie_word_embeddings", False):
        top.refuse("tie_word_embeddings", "true is not supported in a drafter")
    recorded = top.positive("num_target_layers")
    if num_target_layers not in (None, recorded):
        top.refuse(
            "num_target_layers",
            f"the drafter was made for {recorded} layers, the target has {num_target_layers}",
        )
    rank = top.count("markov_rank")
    with_confidence = top.boolean("enable_confidence_head")
    spec = _build(
        top,
        decoder=top,
        head=_head(top, rank, None),
        markov_rank=rank,
        has_confidence=with_confidence,
        # The reference writes this key only for drafters that have the head.
        confidence_with_markov=top.boolean(
            "confidence_head_with_markov", None if with_confidence else False
        ),
        target_layer_ids=read_layer_ids(top, "target_layer_ids", offset=0, limit=recorded),
        num_target_layers=recorded,
        draft_vocab_size=top.positive("draft_vocab_size", top.positive("vocab_size")),
        sample_from_anchor=top.boolean("sample_from_anchor", True),
        bidirectional=top.boolean("sliding_window_non_causal", True),
    )
    top.finish(IRRELEVANT | {KEY})
    return spec


def _parse_speculators(top: Fields, num_target_layers: int | None) -> DrafterSpec:
    kind = top.text("speculators_model_type")
    if kind not in ("dspark", "dflash"):
        top.refuse("speculators_model_type", f"{kind!r} is not supported, only dspark and dflash")
    dspark = kind == "dspark"
    for key in ("markov_rank", "markov_head_type", "enable_confidence_head"):
        if not dspark and top.has(key):
            top.refuse(key, "a dflash speculator has no such head")
    decoder = top.section("transformer_layer_config")
    if decoder.text("model_type", "qwen3") not in MAX_POSITIONS:
        decoder.refuse("model_type", f"{decoder.raw('model_type')!r} is not supported")
    key = "aux_hidden_state_layer_ids"
    layer_ids = read_layer_ids(top, key, offset=1, limit=num_target_layers)
    if max(layer_ids) + 1 == num_target_layers:
        top.refuse(
            key,
            f"{num_target_layers} is the target's last hidden state, and the format does not say "
            "whether that is before or after its final norm",
        )
    rank = top.count("markov_rank", 256) if dspark else 0
    with_confidence = dspark and top.boolean("enable_confidence_head", True)
    spec = _build(
        top,
        decoder=decoder,
        head=_head(top, rank, "vanilla"),
        markov_rank=rank,
        has_confidence=with_confidence,
        confidence_with_markov=top.boolean("confidence_head_with_markov", dspark),
        target_layer_ids=layer_ids,
        # The last layer cannot be tapped (above), so there is one more than the highest tapped.
        num_target_layers=num_target_layers or max(layer_ids) + 2,
        draft_vocab_size=top.positive("draft_vocab_size"),
        sample_from_anchor=top.boolean("sample_from_anchor", dspark),
        bidirectional=top.boolean("sliding_window_non_causal", False),
    )
    # Provenance, and whether the target (not the drafter) shares its embeddings with its head.
    provenance = {"speculators_version", "speculators_config", "tie_word_embeddings"}
    top.finish(IRRELEVANT | provenance)
    decoder.finish(IRRELEVANT | {"tie_word_embeddings"})
    return spec


def _build(
    top: Fields,
    *,
    decoder: Fields,
    head: HeadKind,
    markov_rank: int,
    has_confidence: bool,
    confidence_with_markov: bool,
    target_layer_ids: tuple[int, ...],
    num_target_layers: int,
    draft_vocab_size: int,
    sample_from_anchor: bool,
    bidirectional: bool,
) -> DrafterSpec:
    """Read what both formats share, and check that it fits together."""
    hidden, vocab = decoder.positive("hidden_size"), decoder.positive("vocab_size")
    qwen = decoder.raw("model_type") in (None, "qwen3")
    heads, kv_heads, head_dim = read_heads(decoder, hidden, qwen=qwen)
    refuse_unsupported(decoder)
    if top.raw("target_hidden_size") not in (None, hidden):
        top.refuse(
            "target_hidden_size",
            f"{top.raw('target_hidden_size')} differs from the drafter's hidden size {hidden}",
            hint="a drafter shares the target's embeddings, so the sizes must be equal",
        )
    if draft_vocab_size > vocab:
        top.refuse("draft_vocab_size", f"{draft_vocab_size} exceeds the vocabulary of {vocab}")
    mask = top.count("mask_token_id")
    if mask >= vocab:
        top.refuse("mask_token_id", f"{mask} is outside the vocabulary of {vocab}")
    if has_confidence and confidence_with_markov and head == "none":
        top.refuse("confidence_head_with_markov", "true needs markov_rank > 0")
    layers = decoder.positive("num_hidden_layers")
    gamma = _gamma(top, head, sample_from_anchor=sample_from_anchor)
    default_positions = MAX_POSITIONS["qwen3" if qwen else "llama"]
    max_positions = decoder.positive("max_position_embeddings", default_positions)
    if max_positions <= gamma + 1:
        decoder.refuse("max_position_embeddings", f"{max_positions} has no room for a block")
    return DrafterSpec(
        hidden_size=hidden,
        intermediate_size=decoder.positive("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=decoder.number("rms_norm_eps", 1e-6),
        rope_theta=read_rope_theta(decoder),
        max_position_embeddings=max_positions,
        gamma=gamma,
        mask_token_id=mask,
        target_layer_ids=target_layer_ids,
        num_target_layers=num_target_layers,
        target_hidden_size=hidden,
        vocab_size=vocab,
        draft_vocab_size=draft_vocab_size,
        head=head,
        markov_rank=markov_rank,
        has_confidence=has_confidence,
        confidence_with_markov=has_confidence and confidence_with_markov,
        sliding_windows=_sliding_windows(decoder, layers, qwen=qwen),
        sample_from_anchor=sample_from_anchor,
        causal_sliding_blocks=not bidirectional,
    )


def _gamma(top: Fields, head: HeadKind, *, sample_from_anchor: bool) -> int:
    """Draft tokens of a block of ``block_size`` slots."""
    block = top.positive("block_size")
    if sample_from_anchor:
        return block
    if block == 1:
        top.refuse("block_size", "1 leaves no draft token beside the anchor")
    if head == "rnn":
        top.refuse(
            "sample_from_anchor",
            "false with markov_head_type 'rnn' is not supported",
            hint="the recurrent state would have to start at the anchor's unused slot",
        )
    return block - 1


def _sliding_windows(decoder: Fields, num_layers: int, *, qwen: bool) -> tuple[int | None, ...]:
    """Window of each layer. ``sliding_window: null`` is none; 0 is an error, not none."""
    window = decoder.positive("sliding_window") if decoder.has("sliding_window") else None
    # Qwen3 switches windows off unless told otherwise; Llama-type files have no such switch.
    if not decoder.boolean("use_sliding_window", not qwen):
        window = None
    first = decoder.count("max_window_layers", 28) if qwen else num_layers
    kinds = decoder.raw("layer_types")
    if kinds is None:
        return tuple(window if index >= first else None for index in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        decoder.refuse("layer_types", f"expected {num_layers} entries, got {kinds!r}")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            decoder.refuse("layer_types", f"{kind!r} is not supported")
        if kind == "sliding_attention" and window is None:
            decoder.refuse(
                "layer_types",
                "'sliding_attention' without a window",
                hint="sliding_window is null or use_sliding_window is not true",
            )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _head(top: Fields, rank: int, default: str | None) -> HeadKind:
    kind = top.raw("markov_head_type") or default
    if rank == 0:
        return "none"
    if kind not in _HEADS:
        top.refuse("markov_head_type", f"{kind!r} is not one of {', '.join(_HEADS)}")
    return _HEADS[kind]
