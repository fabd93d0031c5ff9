"""Drafter checkpoints on disk: what both pools read of them.

A verifier needs the projection (``fc`` and ``hidden_norm``: it ships projected features), a
drafter everything. Formats: see `cluster.drafter_config`. Tensor names are the same in both; they
differ in what may be missing and in ``d2t``, the map from draft ids to target ids: absolute ids in
our reduced-vocabulary extension of DeepSpec, offsets (target id = i + d2t[i]) in speculators.

Shape legend: D hidden size, F raw feature width, V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from cluster.autoregressive_checkpoint import load_autoregressive_spec
from cluster.autoregressive_config import is_autoregressive
from cluster.checkpoint_checks import (
    check_shape,
    check_target,
    check_tensors,
    read_d2t,
    target_config,
)
from cluster.drafter_config import is_speculators, parse_config
from cluster.drafter_spec import AutoregressiveSpec, DrafterSpec
from cluster.tensor_folder import TensorFolder, read_json

__all__ = [
    "DrafterCheckpoint",
    "Projection",
    "checkpoint_kind",
    "load_projection",
    "load_spec",
    "open_checkpoint",
    "target_config",
    "tensor_shapes",
]


@dataclass(frozen=True, kw_only=True)
class Projection:
    """What turns raw features into the rows that are shipped (paper equation 2)."""

    fc: Tensor
    """[D, F], no bias."""
    hidden_norm: Tensor | None
    """[D], scale of the RMS norm that follows; None where the drafter norms by itself."""
    rms_norm_eps: float
    target_layer_ids: tuple[int, ...]
    """In the order in which their outputs are concatenated."""
    hidden_size: int
    feature_width: int


@dataclass(frozen=True, kw_only=True)
class DrafterCheckpoint:
    """An opened checkpoint whose tensors have been checked against its configuration."""

    path: Path
    spec: DrafterSpec
    tensors: TensorFolder
    d2t: Tensor
    """[W] int64, target id of each draft id."""


def checkpoint_kind(path: Path) -> Literal["dspark", "autoregressive"]:
    """Which architecture a drafter folder holds; DFlash is DSpark without a sequential head.

    Raises:
        ModelNotFound: no such folder or ``config.json``.
    """
    return "autoregressive" if is_autoregressive(read_json(path / "config.json")) else "dspark"


def load_spec(path: Path, target: Path | None = None) -> DrafterSpec:
    """Shape of the drafter in a folder; with ``target``, checked against that model.

    Raises:
        ModelNotFound: no such folder or ``config.json``.
        CheckpointError: it cannot be honoured, or was made for another target; names the field.
    """
    config = read_json(path / "config.json")
    if target is None:
        return parse_config(config)
    return parse_config(config, num_target_layers=check_target(config, path, target))


def load_projection(path: Path, target: Path | None = None) -> Projection:
    """The verifier's part of a checkpoint, in the dtype of the file. Raises like `load_spec`."""
    spec: DrafterSpec | AutoregressiveSpec
    if checkpoint_kind(path) == "autoregressive":
        spec = load_autoregressive_spec(path, target)
    else:
        spec = load_spec(path, target)
    tensors = TensorFolder(path)
    check_shape(tensors, "fc.weight", (spec.hidden_size, spec.feature_width))
    hidden_norm = None
    if isinstance(spec, DrafterSpec):
        check_shape(tensors, "hidden_norm.weight", (spec.hidden_size,))
        hidden_norm = tensors.get("hidden_norm.weight")
    return Projection(
        fc=tensors.get("fc.weight"),
        hidden_norm=hidden_norm,
        rms_norm_eps=spec.rms_norm_eps,
        target_layer_ids=spec.target_layer_ids,
        hidden_size=spec.hidden_size,
        feature_width=spec.feature_width,
    )


def open_checkpoint(path: Path, target: Path | None = None) -> DrafterCheckpoint:
    """Open a checkpoint and check every tensor's name and shape. Raises like `load_spec`."""
    spec = load_spec(path, target)
    tensors = TensorFolder(path)
    check_tensors(tensors, tensor_shapes(spec), spec)
    offsets = is_speculators(read_json(path / "config.json"))
    return DrafterCheckpoint(
        path=path, spec=spec, tensors=tensors, d2t=read_d2t(spec, tensors, offsets=offsets)
    )


def tensor_shapes(spec: DrafterSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint must hold itself; those of the target may be missing."""
    width, head, rank = spec.hidden_size, spec.head_dim, spec.markov_rank
    query, key = spec.num_heads * head, spec.num_kv_heads * head
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (query, width),
        "self_attn.k_proj": (key, width),
        "self_attn.v_proj": (key, width),
        "self_attn.o_proj": (width, query),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate_proj": (spec.intermediate_size, width),
        "mlp.up_proj": (spec.intermediate_size, width),
        "mlp.down_proj": (width, spec.intermediate_size),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, spec.feature_width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for index in range(spec.num_layers):
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    if rank:
        shapes["markov_head.markov_w1.weight"] = (spec.vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (spec.draft_vocab_size, rank)
    if spec.head == "gated":
        shapes["markov_head.gate_proj.weight"] = (rank, width + rank)
        shapes["markov_head.gate_proj.bias"] = (rank,)
    elif spec.head == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + width)
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if spec.has_confidence:
        shapes["confidence_head.proj.weight"] = (
            1,
            width + (rank if spec.confidence_with_markov else 0),
        )
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes
