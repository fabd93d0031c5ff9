"""`TargetSpec`: what a Llama- or Qwen3-type checkpoint computes, or a refusal naming the field."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cluster.errors import CheckpointError, Unsupported
from cluster.tensor_folder import read_json

_CONFIGS: Final[dict[str, Any]] = {
    "LlamaForCausalLM": LlamaConfig,
    "Qwen3ForCausalLM": Qwen3Config,
}
_FIXED_ROPE: Final = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary types whose frequencies do not depend on how long the sequence has become: keys are
rotated once, when they are written."""


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """Architecture of one target model. Sizes in elements."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    qk_norm: bool
    """Qwen3: an RMS norm over each query and key head."""
    attention_bias: bool
    mlp_bias: bool
    tied_head: bool
    windows: tuple[int | None, ...]
    """Per layer: how many positions, its own included, a query sees; None for all."""
    inverse_frequencies: Tensor
    """[head_dim / 2] rotary angles per position, fp32."""
    rope_scale: float
    """Factor on cosines and sines (yarn)."""
    dtype: torch.dtype
    """Of the checkpoint's weights, as its configuration says."""


def read_spec(folder: Path) -> TargetSpec:
    """Read ``config.json`` of a Hugging Face folder.

    Raises:
        ModelNotFound: no such folder or file.
        Unsupported: an architecture or feature that this engine does not have; names the field.
        CheckpointError: the configuration is malformed; names the field.
    """
    raw = read_json(folder / "config.json")
    architectures = raw.get("architectures")
    if not (isinstance(architectures, list) and len(architectures) == 1):
        raise CheckpointError(f"architectures: expected one name, got {architectures!r}")
    config_class = _CONFIGS.get(architectures[0])
    if config_class is None:
        raise Unsupported(
            f"architectures: {architectures[0]!r} is not one of {sorted(_CONFIGS)}",
            hint="the vllm engine serves other architectures",
        )
    try:
        config = config_class.from_dict(raw)
    except Exception as error:  # transformers validates with many exception types
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error
    _refuse(config, raw)
    frequencies, scale = _rope(config)
    return TargetSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        qk_norm=architectures[0] == "Qwen3ForCausalLM",
        attention_bias=config.attention_bias,
        mlp_bias=getattr(config, "mlp_bias", False),
        tied_head=config.tie_word_embeddings,
        windows=_windows(config),
        inverse_frequencies=frequencies,
        rope_scale=scale,
        dtype=config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32,
    )


def _refuse(config: Any, raw: dict[str, Any]) -> None:
    if raw.get("quantization_config") is not None:
        raise Unsupported("quantization_config: quantized checkpoints are not supported")
    if config.hidden_act != "silu":
        raise Unsupported(f"hidden_act: {config.hidden_act!r} is not 'silu'")
    if config.num_attention_heads % config.num_key_value_heads:
        raise CheckpointError(
            f"num_key_value_heads: {config.num_key_value_heads} does not divide "
            f"num_attention_heads {config.num_attention_heads}"
        )
    if config.head_dim % 2:
        raise CheckpointError(f"head_dim: {config.head_dim} is odd")


def _rope(config: Any) -> tuple[Tensor, float]:
    """Inverse frequencies and the factor on cosines and sines, by transformers' own rules."""
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in _FIXED_ROPE:
        raise Unsupported(
            f"rope_parameters.rope_type: {kind!r} is not one of {sorted(_FIXED_ROPE)}"
        )
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise Unsupported("rope_parameters.partial_rotary_factor: only 1.0 is supported")
    if kind != "default":
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        return frequencies.float(), float(scale)
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return 1.0 / (parameters["rope_theta"] ** exponents), 1.0


def _windows(config: Any) -> tuple[int | None, ...]:
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    if len(kinds) != config.num_hidden_layers:
        raise CheckpointError(
            f"layer_types: {len(kinds)} entries for {config.num_hidden_layers} layers"
        )
    windows: list[int | None] = []
    for kind in kinds:
        if kind == "full_attention":
            windows.append(None)
        elif kind == "sliding_attention" and config.sliding_window:
            windows.append(int(config.sliding_window))
        else:
            raise Unsupported(f"layer_types: {kind!r} (sliding_window {config.sliding_window})")
    return tuple(windows)
