"""From one checkpoint format to the other, tensor by tensor, without loss.

Tensors keep the dtype that they have in the checkpoint. What a format leaves to the target is left
out if it is the target's; what differs from the target's is kept, or refused where the format has
no place for it. ``deepspec`` stands for the flat formats that we write ourselves: DeepSpec's, and
for autoregressive drafters the one like it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor

from cluster import target_probe
from cluster.autoregressive_checkpoint import autoregressive_shapes, open_autoregressive
from cluster.autoregressive_config import autoregressive_config
from cluster.drafter_checkpoint import checkpoint_kind, open_checkpoint, tensor_shapes
from cluster.drafter_spec import AutoregressiveSpec, DrafterSpec
from cluster.errors import CheckpointError
from cluster.tensor_folder import TensorFolder, read_json
from drafter_service.checkpoint_folder import check_output, publish
from drafter_service.deepspec_format import deepspec_config
from drafter_service.loading import TargetTensors
from drafter_service.speculators_format import (
    Verifier,
    eagle3_config,
    in_rising_order,
    speculators_config,
    vocabulary_maps,
)

Format = Literal["deepspec", "speculators"]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)

_EMBEDDINGS: Final = "embed_tokens.weight"
_LM_HEAD: Final = "lm_head.weight"
_CONFIDENCE: Final = "confidence_head."


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A checkpoint that was written."""

    folder: Path
    notes: tuple[str, ...]
    """What the user should know: left out, or changed without effect on the drafts."""


@dataclass(frozen=True, kw_only=True)
class _Source:
    """An opened checkpoint of either architecture."""

    spec: DrafterSpec | AutoregressiveSpec
    own: Mapping[str, Tensor]
    """The tensors that it has in every format."""
    tensors: TensorFolder
    d2t: Tensor
    """[W] int64, target ids."""
    target: TargetTensors

    @property
    def is_reduced(self) -> bool:
        return self.spec.draft_vocab_size != self.spec.vocab_size

    def target_lm_head(self) -> Tensor:
        """[W, D], the target's rows in the order of the draft ids."""
        return self.target.lm_head()[self.d2t]

    def or_targets(self, name: str, of_target: Callable[[], Tensor]) -> Tensor:
        """The stored tensor if there is one, else the target's: in its dtype, so not rounded."""
        return self.tensors.get(name) if name in self.tensors else of_target()


@dataclass(frozen=True, kw_only=True)
class _Contents:
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    notes: list[str]


def export_drafter(
    checkpoint: Path,
    target: Path,
    output: Path,
    *,
    format: Format,
    verifier: str = "",
    force: bool = False,
) -> Exported:
    """Write the drafter in ``checkpoint`` to ``output`` in the given format.

    Args:
        target: the model that it drafts for; its LM head is read if the format stores a part of it.
        output: a new or empty folder; with ``force`` also one that holds another drafter, which is
            replaced as a whole.
        verifier: name under which a speculators checkpoint finds the target; the folder by default.

    Raises:
        ModelNotFound: a folder, or a file that it must have, is missing.
        CheckpointError: the checkpoint does not fit the target, or the format has no place for it.
        ConfigError: ``output`` is in use, is the checkpoint itself, or cannot be written.
        StorageFull: no room; ``output`` is as it was.
    """
    output = output.expanduser().absolute()
    check_output(output, checkpoint, force=force)
    source = _open(checkpoint, target)
    if format == "deepspec":
        contents = _as_deepspec(source)
    else:
        architectures = read_json(target / "config.json").get("architectures") or []
        name = verifier or str(target.absolute())
        contents = _as_speculators(source, Verifier(name=name, architectures=tuple(architectures)))
    dtype = contents.tensors["fc.weight"].dtype
    config = {**contents.config, "dtype": str(dtype).removeprefix("torch.")}
    if (checkpoint / "calibration.json").exists():
        contents.notes.append(
            "calibration.json is bound to the old weights file and was left out: "
            "run `dspark calibrate` on the new folder"
        )
    publish(config, contents.tensors, output)
    return Exported(folder=output, notes=tuple(contents.notes))


def _open(checkpoint: Path, target: Path) -> _Source:
    if checkpoint_kind(checkpoint) == "dspark":
        dspark = open_checkpoint(checkpoint, target)
        return _source(dspark.spec, dspark.tensors, tensor_shapes(dspark.spec), dspark.d2t, target)
    other = open_autoregressive(checkpoint, target)
    return _source(other.spec, other.tensors, autoregressive_shapes(other.spec), other.d2t, target)


def _source(
    spec: DrafterSpec | AutoregressiveSpec,
    tensors: TensorFolder,
    shapes: Mapping[str, tuple[int, ...]],
    d2t: Tensor,
    target: Path,
) -> _Source:
    own = {name: tensors.get(name) for name in shapes}
    return _Source(spec=spec, own=own, tensors=tensors, d2t=d2t, target=TargetTensors(target, spec))


def _as_deepspec(source: _Source) -> _Contents:
    spec, stored = source.spec, source.tensors
    tensors = dict(source.own)
    if _EMBEDDINGS in stored and not _is_copy(stored.get(_EMBEDDINGS), source.target.embeddings):
        tensors[_EMBEDDINGS] = stored.get(_EMBEDDINGS)
    if _LM_HEAD in stored and not _is_copy(stored.get(_LM_HEAD), source.target_lm_head):
        tensors[_LM_HEAD] = stored.get(_LM_HEAD)
    if not torch.equal(source.d2t, torch.arange(spec.vocab_size)):
        tensors["d2t"] = source.d2t
    config = deepspec_config(spec) if isinstance(spec, DrafterSpec) else autoregressive_config(spec)
    config[target_probe.KEY] = target_probe.probe(source.target.embeddings())
    return _Contents(config=config, tensors=tensors, notes=[])


def _as_speculators(source: _Source, verifier: Verifier) -> _Contents:
    spec, stored, notes = source.spec, source.tensors, []
    tensors = dict(source.own)
    if isinstance(spec, DrafterSpec):
        config, keeps_head = speculators_config(spec, verifier), source.is_reduced
        if _EMBEDDINGS in stored:
            _refuse_own(_EMBEDDINGS, stored.get(_EMBEDDINGS), source.target.embeddings)
        if _LM_HEAD in stored and not keeps_head:
            _refuse_own(_LM_HEAD, stored.get(_LM_HEAD), source.target_lm_head)
    else:
        config, keeps_head = eagle3_config(spec, verifier), True
        # The package stores both for this kind, and takes random embeddings where they are missing.
        tensors[_EMBEDDINGS] = source.or_targets(_EMBEDDINGS, source.target.embeddings)
        if spec.has_confidence:
            tensors = {name: t for name, t in tensors.items() if not name.startswith(_CONFIDENCE)}
            notes.append("the confidence head was left out: eagle3 speculators have none")
    if keeps_head:
        tensors[_LM_HEAD] = source.or_targets(_LM_HEAD, source.target_lm_head)
    tensors, d2t = in_rising_order(tensors, source.d2t)
    if not torch.equal(d2t, source.d2t):
        notes.append("draft ids were renumbered: the format wants their target ids to rise")
    if source.is_reduced:
        tensors |= vocabulary_maps(spec.vocab_size, d2t)
    return _Contents(config=config, tensors=tensors, notes=notes)


def _is_copy(own: Tensor, of_target: Callable[[], Tensor]) -> bool:
    """Whether a stored tensor is the target's, as it is in the stored dtype."""
    return torch.equal(own, of_target().to(own.dtype))


def _refuse_own(name: str, own: Tensor, of_target: Callable[[], Tensor]) -> None:
    if not _is_copy(own, of_target):
        raise CheckpointError(
            f"{name}: the checkpoint's differs from the target's, and the speculators format has "
            "no place for it: its readers take the target's",
        )
