"""Feature sequences on disk: files of a few dozen, and a folder that finds them by their ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cluster.errors import CheckpointError
from cluster.tensor_file import write_tensors


@dataclass(frozen=True, kw_only=True)
class FeatureSequence:
    """One sequence with what the target computed on it.

    Shape legend: N positions, F feature width (tapped layers side by side), D target hidden size.

    Row i of ``hidden`` and ``log_normaliser`` gives the target's law of the id at position
    i + 1. The log-normaliser is infinite before the last prompt position: no law there is
    trained on. It belongs to the *stored* (rounded) hidden state, so probabilities rebuilt from
    the pair never sum past one. Nothing reads the last row: no id of the text comes after it.
    """

    ids: Tensor
    """int64 [N]"""
    num_prompt: int
    features: Tensor
    """bfloat16 [N, F], transformers' ``hidden_states[layer id + 1]``"""
    hidden: Tensor
    """float16 [N, D], after the target's final norm"""
    log_normaliser: Tensor
    """float32 [N]"""

    def __len__(self) -> int:
        return len(self.ids)


def write_shard(
    path: Path, sequences: Sequence[FeatureSequence], metadata: Mapping[str, str] | None = None
) -> None:
    """Write sequences to one file.

    Raises:
        StorageFull: no room; there is no partial file.
    """
    write_tensors(
        path,
        {
            "lengths": torch.tensor([len(sequence) for sequence in sequences]),
            "num_prompt": torch.tensor([sequence.num_prompt for sequence in sequences]),
            "ids": torch.cat([sequence.ids for sequence in sequences]),
            "features": torch.cat([sequence.features for sequence in sequences]),
            "hidden": torch.cat([sequence.hidden for sequence in sequences]),
            "log_normaliser": torch.cat([sequence.log_normaliser for sequence in sequences]),
        },
        {"format": "pt", **(metadata or {})},
    )


def read_shard(path: Path) -> list[FeatureSequence]:
    """The sequences of one file, memory-mapped.

    Raises:
        CheckpointError: the file is not a shard.
    """
    try:
        with safe_open(path, framework="pt") as file:
            flat = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        lengths = flat["lengths"].tolist()
        parts = zip(
            flat["ids"].split(lengths),
            flat["num_prompt"].tolist(),
            flat["features"].split(lengths),
            flat["hidden"].split(lengths),
            flat["log_normaliser"].split(lengths),
            strict=True,
        )
    except (SafetensorError, KeyError) as error:
        raise _damaged(path, error) from error
    return [
        FeatureSequence(
            ids=ids_N,
            num_prompt=num_prompt,
            features=features_NF,
            hidden=hidden_ND,
            log_normaliser=log_normaliser_N,
        )
        for ids_N, num_prompt, features_NF, hidden_ND, log_normaliser_N in parts
    ]


class GeneratedFeatures:
    """Features kept while responses were generated: a folder of shards, looked up by ids.

    Args:
        folder: where features of any target and tap list may lie; each has a folder of its own.
        target: fingerprint of the target.
        target_layer_ids: tapped layers, in the order of ``features``.

    Raises:
        CheckpointError: a shard is damaged.
    """

    def __init__(self, folder: Path, *, target: str, target_layer_ids: Sequence[int]) -> None:
        taps = "-".join(map(str, target_layer_ids))
        self._folder = folder / f"{target[:16]}-taps-{taps}"
        self._places: dict[str, tuple[Path, int]] = {}
        self._open: dict[Path, list[FeatureSequence]] = {}
        for path in sorted(self._folder.glob("*.safetensors")):
            self._index(path, _names(path))

    def __len__(self) -> int:
        return len(self._places)

    def add(self, sequences: Sequence[FeatureSequence]) -> None:
        """Write one shard.

        Raises:
            StorageFull: no room; there is no partial file.
        """
        names = [_name(sequence.ids) for sequence in sequences]
        # Named by content: made again after a kill, a shard replaces itself.
        whole = hashlib.sha256("".join(names).encode()).hexdigest()[:16]
        path = self._folder / f"{whole}.safetensors"
        write_shard(path, sequences, {"names": json.dumps(names)})
        self._index(path, names)

    def find(self, ids: Sequence[int]) -> FeatureSequence | None:
        """The sequence with exactly these ids, memory-mapped; None when it was not kept."""
        place = self._places.get(_name(torch.tensor(ids)))
        if place is None:
            return None
        path, index = place
        if path not in self._open:
            self._open[path] = read_shard(path)
        return self._open[path][index]

    def _index(self, path: Path, names: Sequence[str]) -> None:
        self._places.update({name: (path, index) for index, name in enumerate(names)})


def _name(ids_N: Tensor) -> str:
    return hashlib.sha256(ids_N.to(torch.int64).numpy().tobytes()).hexdigest()[:32]


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            names: list[str] = json.loads(file.metadata()["names"])
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise _damaged(path, error) from error
    return names


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} is not a feature shard: {error}", hint="delete it; it will be computed again"
    )
