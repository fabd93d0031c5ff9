"""What the drafter learns from: one target forward per sequence, cached in shards on disk.

Hidden states are kept, not logits: O(D) a token (paper section 3.3). Beside them goes the exact
log-normaliser over the *full* vocabulary, so that the probabilities of a reduced draft vocabulary
can be rebuilt from its few head rows, and what lies outside is one minus their sum.

Shape legend: N positions of one sequence, D target hidden size, F feature width (tapped layers
side by side), V target vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cluster.errors import CheckpointError
from drafter_service.training.atomic import write_json, write_tensors
from drafter_service.training.dataset import Record
from drafter_service.training.target import Target

_HEAD_ROWS = 128
"""Rows of full-vocabulary logits alive at once: 25 MB at a vocabulary of 49,152."""


@dataclass(frozen=True, kw_only=True)
class FeatureSequence:
    """One sequence with what the target computed on it.

    Row i of ``hidden`` and ``log_normaliser`` gives the target's law of the id at position
    i + 1. The log-normaliser is infinite before the last prompt position: no law there is
    trained on. It belongs to the *stored* (rounded) hidden state, so probabilities rebuilt from
    the pair never sum past one.
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


@dataclass(frozen=True, kw_only=True)
class StoreKey:
    """What a folder of shards was computed from; any difference makes them useless."""

    target: str
    """Fingerprint of the target's folder."""
    data: str
    """Digest of the records, in order."""
    target_layer_ids: tuple[int, ...]
    shard_size: int
    """Sequences a shard."""


@torch.no_grad()
def compute_features(
    target: Target, record: Record, target_layer_ids: tuple[int, ...]
) -> FeatureSequence:
    """One target forward over a whole sequence."""
    ids_N = torch.tensor(record.ids)
    taps, hidden_ND = target.hidden_states(ids_N, target_layer_ids)
    hidden_ND = hidden_ND.half()
    first_law = len(record.prompt) - 1
    log_normaliser_N = torch.full((len(ids_N),), torch.inf)
    for start in range(first_law, len(ids_N), _HEAD_ROWS):
        rows = slice(start, start + _HEAD_ROWS)
        log_normaliser_N[rows] = target.logits(hidden_ND[rows].float()).logsumexp(-1)
    return FeatureSequence(
        ids=ids_N,
        num_prompt=len(record.prompt),
        features=torch.cat(taps, dim=-1).bfloat16().cpu(),
        hidden=hidden_ND.cpu(),
        log_normaliser=log_normaliser_N,
    )


class FeatureStore:
    """A folder of feature shards over a list of records, filled on demand and kept.

    Args:
        folder: where the shards lie; created when absent.
        records: the sequences, in the order of the shards.
        key: what the shards depend on.
        compute: `compute_features` on the run's target; called for missing shards only.

    Raises:
        CheckpointError: the folder holds shards of another target, data set or tap list.
        StorageFull: no room for the next shard (from `shard`).
    """

    def __init__(
        self,
        folder: Path,
        records: Sequence[Record],
        key: StoreKey,
        compute: Callable[[Record], FeatureSequence],
    ) -> None:
        self._folder = folder
        self._records = records
        self._key = key
        self._compute = compute
        self._check_manifest()

    def __len__(self) -> int:
        return len(self._records)

    @property
    def shard_size(self) -> int:
        return self._key.shard_size

    @property
    def num_shards(self) -> int:
        return -(-len(self._records) // self._key.shard_size)

    def shard(self, index: int) -> list[FeatureSequence]:
        """The sequences of one shard, memory-mapped; computed first when missing."""
        if not self._path(index).is_file():
            self._fill(index)
        try:
            return _read_shard(self._path(index))
        except (SafetensorError, KeyError) as error:
            raise CheckpointError(
                f"{self._path(index)} is not a feature shard: {error}",
                hint="delete it; it will be computed again",
            ) from error

    def all(self) -> list[FeatureSequence]:
        """Every sequence, in order."""
        return [sequence for index in range(self.num_shards) for sequence in self.shard(index)]

    def _path(self, index: int) -> Path:
        return self._folder / f"shard-{index:05d}.safetensors"

    def _fill(self, index: int) -> None:
        size = self._key.shard_size
        records = self._records[index * size : (index + 1) * size]
        _write_shard(self._path(index), [self._compute(record) for record in records])

    def _check_manifest(self) -> None:
        path = self._folder / "manifest.json"
        wanted = json.loads(json.dumps(asdict(self._key)))
        if not path.is_file():
            write_json(path, wanted)
            return
        found = json.loads(path.read_text())
        different = [name for name in wanted if found.get(name) != wanted[name]]
        if different:
            raise CheckpointError(
                f"{self._folder} holds features of another run (differs in {', '.join(different)})",
                hint="choose another work folder, or delete this one",
            )


def _write_shard(path: Path, sequences: Sequence[FeatureSequence]) -> None:
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
        {"format": "pt"},
    )


def _read_shard(path: Path) -> list[FeatureSequence]:
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
