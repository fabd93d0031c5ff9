"""What the drafter learns from: target forwards over whole sequences, cached in shards on disk.

Hidden states are kept, not logits: O(D) a token (paper section 3.3). Beside them goes the exact
log-normaliser over the *full* vocabulary, so that the probabilities of a reduced draft vocabulary
can be rebuilt from its few head rows, and what lies outside is one minus their sum.

Shape legend: N positions of one sequence, D target hidden size, F feature width (tapped layers
side by side), V target vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from cluster.atomic_file import write_json
from cluster.errors import CheckpointError
from drafter_service.training.dataset import Record
from drafter_service.training.shards import (
    FeatureSequence,
    GeneratedFeatures,
    read_shard,
    write_shard,
)
from drafter_service.training.target import Target

_HEAD_ROWS = 128
"""Rows of full-vocabulary logits alive at once: 25 MB at a vocabulary of 49,152."""
_SEQUENCES_AT_ONCE = {"cpu": 1, "cuda": 32}
"""A CPU gains nothing from padding; on a GPU a forward of one sequence is mostly waiting."""

Compute = Callable[[Sequence[Record]], list[FeatureSequence]]
"""Features of sequences, in order."""


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


def compute_features(
    target: Target,
    records: Sequence[Record],
    target_layer_ids: tuple[int, ...],
    *,
    at_once: int | None = None,
) -> list[FeatureSequence]:
    """Target forwards over whole sequences.

    Args:
        at_once: sequences a forward, padded to the longest; None: what suits the device.
    """
    step = at_once or _SEQUENCES_AT_ONCE.get(target.device.type, 1)
    sequences: list[FeatureSequence] = []
    for first in range(0, len(records), step):
        part = records[first : first + step]
        computed = target.hidden_states_of([record.ids for record in part], target_layer_ids)
        sequences += [
            feature_sequence(record.ids, len(record.prompt), features_NF, hidden_ND, target.logits)
            for record, (features_NF, hidden_ND) in zip(part, computed, strict=True)
        ]
    return sequences


@torch.no_grad()
def feature_sequence(
    ids: Sequence[int],
    num_prompt: int,
    features_NF: Tensor,
    hidden_ND: Tensor,
    logits: Callable[[Tensor], Tensor],
) -> FeatureSequence:
    """What is kept of a target forward: rounded states, exact log-normalisers of the laws.

    Args:
        features_NF: tapped layers side by side.
        hidden_ND: after the final norm.
        logits: the target's head, [n, D] -> [n, V] in fp32.
    """
    hidden_ND = hidden_ND.half()
    log_normaliser_N = torch.full((len(ids),), torch.inf)
    for start in range(num_prompt - 1, len(ids), _HEAD_ROWS):
        rows = slice(start, start + _HEAD_ROWS)
        log_normaliser_N[rows] = logits(hidden_ND[rows].float()).logsumexp(-1)
    return FeatureSequence(
        ids=torch.tensor(ids),
        num_prompt=num_prompt,
        features=features_NF.bfloat16().cpu(),
        hidden=hidden_ND.cpu(),
        log_normaliser=log_normaliser_N,
    )


class FeatureStore:
    """A folder of feature shards over a list of records, filled on demand and kept.

    Args:
        folder: where the shards lie; created when absent.
        records: the sequences, in the order of the shards.
        key: what the shards depend on.
        compute: `compute_features` on the run's target; called for what is missing only.
        generated: features kept by the generation of these records, taken before any are computed.

    Raises:
        CheckpointError: the folder holds shards of another target, data set or tap list.
        StorageFull: no room for the next shard (from `shard`).
    """

    def __init__(
        self,
        folder: Path,
        records: Sequence[Record],
        key: StoreKey,
        compute: Compute,
        generated: GeneratedFeatures | None = None,
    ) -> None:
        self._folder = folder
        self._records = records
        self._key = key
        self._compute = compute
        self._generated = generated
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
        """The sequences of one shard, memory-mapped; computed first when missing.

        Raises:
            CheckpointError: the shard's file is damaged.
            StorageFull: no room for it.
        """
        path = self._folder / f"shard-{index:05d}.safetensors"
        if path.is_file():
            return read_shard(path)
        size = self._key.shard_size
        records = self._records[index * size : (index + 1) * size]
        found = [self._find(record) for record in records]
        missing = [record for record, known in zip(records, found, strict=True) if known is None]
        if not missing:
            return [sequence for sequence in found if sequence is not None]
        computed = iter(self._compute(missing))
        write_shard(path, [next(computed) if sequence is None else sequence for sequence in found])
        return read_shard(path)

    def fill(self, shards: Iterable[int]) -> None:
        """See to it that these shards are there."""
        for index in shards:
            self.shard(index)

    def all(self) -> list[FeatureSequence]:
        """Every sequence, in order."""
        return [sequence for index in range(self.num_shards) for sequence in self.shard(index)]

    def _find(self, record: Record) -> FeatureSequence | None:
        return None if self._generated is None else self._generated.find(record.ids)

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
