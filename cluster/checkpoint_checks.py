"""Checks of a drafter checkpoint against its configuration and its target, for all architectures.

Shape legend: V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from cluster.drafter_spec import AutoregressiveSpec, DrafterSpec
from cluster.errors import CheckpointError
from cluster.target_probe import KEY, LEAST_CORRELATION, correlation, probe, read_probe
from cluster.tensor_folder import TensorFolder, read_json

TARGET_EMBEDDINGS: Final = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)
"""Where targets keep their input embeddings."""

_UNUSED: Final = frozenset({"verifier_norm.weight", "verifier_lm_head.weight"})
"""Copies of the target's tensors that speculators trains against and may have saved."""


def target_config(target: Path) -> dict[str, Any]:
    """The text model's part of a target's ``config.json``. Raises like `read_json`."""
    config = read_json(target / "config.json")
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def check_target(config: dict[str, Any], path: Path, target: Path) -> int:
    """Refuse a drafter that was not made for this target. Returns the target's number of layers.

    Raises:
        CheckpointError: sizes differ, or the drafter's probe says that it was another model.
    """
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
    _check_probe(config, path, target)
    return layers


def find_embeddings(tensors: TensorFolder) -> str | None:
    """Name of the input embeddings in a target's folder, None if it has none that we know."""
    return next((name for name in TARGET_EMBEDDINGS if name in tensors), None)


def _check_probe(config: dict[str, Any], path: Path, target: Path) -> None:
    recorded = read_probe(config)
    if recorded is None:
        return
    tensors = TensorFolder(target)
    name = find_embeddings(tensors)
    if name is None:
        raise CheckpointError(f"{target} has no embed_tokens.weight: {path} cannot be its drafter")
    model = target_config(target)
    if tensors.shapes[name] != (model["vocab_size"], model["hidden_size"]):
        raise CheckpointError(f"{target}: {name} has shape {tensors.shapes[name]}")
    alike = correlation(recorded, probe(tensors.get(name)))
    if not alike >= LEAST_CORRELATION:
        raise CheckpointError(
            f"drafter {path} was made for another model of the same shape than {target}: "
            f"their embeddings have a correlation of {alike:.2f}",
            hint=f"a drafter only fits the target that it was trained with; delete {KEY!r} from "
            "its config.json to use it all the same",
        )


def check_shape(tensors: TensorFolder, name: str, shape: tuple[int, ...]) -> None:
    """Refuse a tensor that is missing or has another shape."""
    if name not in tensors:
        raise CheckpointError(f"{tensors.path} has no tensor {name!r}")
    if tensors.shapes[name] != shape:
        raise CheckpointError(
            f"{tensors.path}: tensor {name!r} has shape {tensors.shapes[name]}, "
            f"the configuration asks for {shape}"
        )


def check_tensors(
    tensors: TensorFolder,
    own: Mapping[str, tuple[int, ...]],
    spec: DrafterSpec | AutoregressiveSpec,
) -> None:
    """Refuse a checkpoint that lacks one of its ``own`` tensors, or has one without a place."""
    shared = {
        "embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "lm_head.weight": (spec.draft_vocab_size, spec.hidden_size),
    }
    for name, shape in own.items():
        check_shape(tensors, name, shape)
    for name, shape in shared.items():
        if name in tensors:
            check_shape(tensors, name, shape)
    known = own.keys() | shared.keys() | _UNUSED | {"d2t", "t2d"}
    for name in tensors.shapes:
        if name not in known:
            raise CheckpointError(
                f"{tensors.path}: tensor {name!r} has no place in this architecture"
            )


def read_d2t(
    spec: DrafterSpec | AutoregressiveSpec, tensors: TensorFolder, *, offsets: bool
) -> Tensor:
    """int64 [W], the target id of each draft id; ``offsets``: stored as offsets from the draft id.

    Raises:
        CheckpointError: missing where it is needed, not integers, ids outside or twice, or at odds
            with ``t2d``.
    """
    identity = torch.arange(spec.draft_vocab_size)
    if "d2t" not in tensors:
        if spec.draft_vocab_size != spec.vocab_size:
            raise CheckpointError(
                f"{tensors.path} has no tensor 'd2t', which draft_vocab_size "
                f"{spec.draft_vocab_size} of {spec.vocab_size} needs"
            )
        return identity
    check_shape(tensors, "d2t", (spec.draft_vocab_size,))
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
        check_shape(tensors, "t2d", (spec.vocab_size,))
        marked = tensors.get("t2d").bool()
        if int(marked.sum()) != d2t.numel() or not bool(marked[d2t].all()):
            raise CheckpointError(f"{tensors.path}: 't2d' and 'd2t' disagree")
    return d2t
