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
from typing import Any, Final

import torch
from torch import Tensor

from cluster.drafter_config import is_speculators, parse_config
from cluster.drafter_spec import DrafterSpec
from cluster.errors import CheckpointError
from cluster.tensor_folder import TensorFolder, read_json

_UNUSED: Final = frozenset({"verifier_norm.weight", "verifier_lm_head.weight"})
"""Copies of the target's tensors that speculators trains against and may have saved."""


@dataclass(frozen=True, kw_only=True)
class Projection:
    """The two tensors that turn raw features into ``H_ctx`` (paper equation 2)."""

    fc: Tensor
    """[D, F], no bias."""
    hidden_norm: Tensor
    """[D], scale of the RMS norm that follows."""
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


def load_spec(path: Path, target: Path | None = None) -> DrafterSpec:
    """Shape of the drafter in a folder; with ``target``, checked against that model.

    Raises:
        ModelNotFound: no such folder or ``config.json``.
        CheckpointError: it cannot be honoured, or was made for another target; names the field.
    """
    config = read_json(path / "config.json")
    if target is None:
        return parse_config(config)
    return parse_config(config, num_target_layers=_check_target(config, path, target))


def load_projection(path: Path, target: Path | None = None) -> Projection:
    """The verifier's part of a checkpoint, in the dtype of the file. Raises like `load_spec`."""
    spec = load_spec(path, target)
    tensors = TensorFolder(path)
    _check_shape(tensors, "fc.weight", (spec.hidden_size, spec.feature_width))
    _check_shape(tensors, "hidden_norm.weight", (spec.hidden_size,))
    return Projection(
        fc=tensors.get("fc.weight"),
        hidden_norm=tensors.get("hidden_norm.weight"),
        rms_norm_eps=spec.rms_norm_eps,
        target_layer_ids=spec.target_layer_ids,
        hidden_size=spec.hidden_size,
        feature_width=spec.feature_width,
    )


def open_checkpoint(path: Path, target: Path | None = None) -> DrafterCheckpoint:
    """Open a checkpoint and check every tensor's name and shape. Raises like `load_spec`."""
    spec = load_spec(path, target)
    tensors = TensorFolder(path)
    expected = tensor_shapes(spec)
    shared = {
        "embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "lm_head.weight": (spec.draft_vocab_size, spec.hidden_size),
    }
    for name, shape in expected.items():
        _check_shape(tensors, name, shape)
    for name, shape in shared.items():
        if name in tensors:
            _check_shape(tensors, name, shape)
    known = expected.keys() | shared.keys() | _UNUSED | {"d2t", "t2d"}
    for name in tensors.shapes:
        if name not in known:
            raise CheckpointError(f"{path}: tensor {name!r} has no place in this architecture")
    offsets = is_speculators(read_json(path / "config.json"))
    return DrafterCheckpoint(
        path=path, spec=spec, tensors=tensors, d2t=_read_d2t(spec, tensors, offsets=offsets)
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


def target_config(target: Path) -> dict[str, Any]:
    """The text model's part of a target's ``config.json``. Raises like `read_json`."""
    config = read_json(target / "config.json")
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _check_target(config: dict[str, Any], path: Path, target: Path) -> int:
    """Refuse a drafter that was not made for this target. Returns the target's number of layers."""
    model = target_config(target)
    nested = config.get("transformer_layer_config")
    decoder = nested if isinstance(nested, dict) else config
    layers = model.get("num_hidden_layers")
    pairs = [
        ("vocab_size", decoder.get("vocab_size"), model.get("vocab_size")),
        ("hidden_size", decoder.get("hidden_size"), model.get("hidden_size")),
        ("num_target_layers", config.get("num_target_layers", layers), layers),
    ]
    for name, of_drafter, of_target in pairs:
        if of_drafter != of_target:
            raise CheckpointError(
                f"{name}: drafter {path} was made for {of_drafter}, "
                f"target {target} has {of_target}",
                hint="a drafter only fits the target that it was trained with",
            )
    if not isinstance(layers, int):
        raise CheckpointError(f"num_hidden_layers: missing in {target / 'config.json'}")
    return layers


def _check_shape(tensors: TensorFolder, name: str, shape: tuple[int, ...]) -> None:
    if name not in tensors:
        raise CheckpointError(f"{tensors.path} has no tensor {name!r}")
    if tensors.shapes[name] != shape:
        raise CheckpointError(
            f"{tensors.path}: tensor {name!r} has shape {tensors.shapes[name]}, "
            f"the configuration asks for {shape}"
        )


def _read_d2t(spec: DrafterSpec, tensors: TensorFolder, *, offsets: bool) -> Tensor:
    identity = torch.arange(spec.draft_vocab_size)
    if "d2t" not in tensors:
        if spec.draft_vocab_size != spec.vocab_size:
            raise CheckpointError(
                f"{tensors.path} has no tensor 'd2t', which draft_vocab_size "
                f"{spec.draft_vocab_size} of {spec.vocab_size} needs"
            )
        return identity
    _check_shape(tensors, "d2t", (spec.draft_vocab_size,))
    raw = tensors.get("d2t")
    if raw.is_floating_point() or raw.dtype == torch.bool:
        raise CheckpointError(f"{tensors.path}: tensor 'd2t' is {raw.dtype}, expected integers")
    d2t = raw.long() + identity if offsets else raw.long()
    if int(d2t.min()) < 0 or int(d2t.max()) >= spec.vocab_size:
        raise CheckpointError(
            f"{tensors.path}: 'd2t' names ids outside the target's vocabulary of {spec.vocab_size}"
        )
    if len(set(d2t.tolist())) != d2t.numel():
        raise CheckpointError(f"{tensors.path}: 'd2t' names a target id twice")
    if "t2d" in tensors:
        _check_shape(tensors, "t2d", (spec.vocab_size,))
        marked = tensors.get("t2d").bool()
        if int(marked.sum()) != d2t.numel() or not bool(marked[d2t].all()):
            raise CheckpointError(f"{tensors.path}: 't2d' and 'd2t' disagree")
    return d2t
