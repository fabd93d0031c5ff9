"""Checkpoints of autoregressive drafters on disk, checked against their configuration.

Formats: see `cluster.autoregressive_config`. Our own stores ``d2t`` as target ids and leaves the
target's embeddings and head out; speculators stores offsets and a head of the drafter's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from cluster.autoregressive_config import parse_autoregressive
from cluster.checkpoint_checks import check_target, check_tensors, read_d2t
from cluster.drafter_config import is_speculators
from cluster.drafter_spec import AutoregressiveSpec
from cluster.tensor_folder import TensorFolder, read_json


@dataclass(frozen=True, kw_only=True)
class AutoregressiveCheckpoint:
    """An opened checkpoint whose tensors have been checked against its configuration."""

    path: Path
    spec: AutoregressiveSpec
    tensors: TensorFolder
    d2t: Tensor
    """[W] int64, target id of each draft id."""


def load_autoregressive_spec(path: Path, target: Path | None = None) -> AutoregressiveSpec:
    """Shape of the drafter in a folder; with ``target``, checked against that model.

    Raises:
        ModelNotFound: no such folder or ``config.json``.
        CheckpointError: it cannot be honoured, or was made for another target; names the field.
    """
    config = read_json(path / "config.json")
    layers = None if target is None else check_target(config, path, target)
    return parse_autoregressive(config, num_target_layers=layers)


def open_autoregressive(path: Path, target: Path | None = None) -> AutoregressiveCheckpoint:
    """Open a checkpoint and check every tensor. Raises like `load_autoregressive_spec`."""
    spec = load_autoregressive_spec(path, target)
    tensors = TensorFolder(path)
    check_tensors(tensors, autoregressive_shapes(spec), spec)
    offsets = is_speculators(read_json(path / "config.json"))
    return AutoregressiveCheckpoint(
        path=path, spec=spec, tensors=tensors, d2t=read_d2t(spec, tensors, offsets=offsets)
    )


def autoregressive_shapes(spec: AutoregressiveSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint must hold itself; those of the target may be missing."""
    width, head = spec.hidden_size, spec.head_dim
    query, key = spec.num_heads * head, spec.num_kv_heads * head
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (query, 2 * width),
        "self_attn.k_proj": (key, 2 * width),
        "self_attn.v_proj": (key, 2 * width),
        "self_attn.o_proj": (width, query),
        "mlp.gate_proj": (spec.intermediate_size, width),
        "mlp.up_proj": (spec.intermediate_size, width),
        "mlp.down_proj": (width, spec.intermediate_size),
        "input_layernorm": (width,),
        "hidden_norm": (width,),
        "post_attention_layernorm": (width,),
    }
    if spec.norms_heads:
        layer |= {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, spec.feature_width),
        "norm.weight": (width,),
    }
    shapes |= {f"layers.0.{name}.weight": shape for name, shape in layer.items()}
    if spec.has_confidence:
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return shapes
