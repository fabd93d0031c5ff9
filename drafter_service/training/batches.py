"""Which sequences and anchors make up step n: a pure function of the seed and n.

Nothing is carried from step to step, so a resumed run draws exactly what an unbroken one would.
The first pass visits the shards in order, so that training can start when the first one exists;
later passes are shuffled over everything.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from cluster.errors import ConfigError
from drafter_service.training.features import FeatureStore
from drafter_service.training.packing import Pack, draw_anchors, pack
from drafter_service.training.ranks import Ranks
from drafter_service.training.shards import FeatureSequence

_STREAM = 1 << 32
"""Streams of random numbers are this far apart; steps and epochs stay below it."""


class Batches:
    """Packs drawn from a feature store."""

    def __init__(
        self,
        store: FeatureStore,
        *,
        sequences_per_step: int,
        anchors_per_sequence: int,
        gamma: int,
        seed: int,
        ranks: Ranks | None = None,
    ) -> None:
        """
        Raises:
            ConfigError: fewer sequences a step than ranks.
        """
        self._ranks = ranks or Ranks()
        if sequences_per_step < self._ranks.num:
            raise ConfigError(
                f"schedule.sequences_per_step = {sequences_per_step} for {self._ranks.num} ranks",
                hint="every rank needs a sequence",
            )
        self._store = store
        self._sequences_per_step = sequences_per_step
        self._num_anchors = anchors_per_sequence
        self._gamma = gamma
        self._seed = seed
        self._open: dict[int, list[FeatureSequence]] = {}
        self._permutation = lru_cache(maxsize=2)(self._permute)

    def pack(self, step: int) -> Pack:
        """This rank's blocks of step ``step`` (from 0); computes feature shards not seen before.

        Anchors are drawn for the whole step on every rank, so that how many ranks there are
        decides nothing but who computes what.
        """
        first = step * self._sequences_per_step
        sequences = [self._draw(first + i) for i in range(self._sequences_per_step)]
        generator = torch.Generator().manual_seed(2 * self._seed * _STREAM + step)
        anchors_SA = torch.stack(
            [draw_anchors(sequence, self._num_anchors, generator) for sequence in sequences]
        )
        mine = slice(self._ranks.rank, None, self._ranks.num)
        return pack(sequences[mine], anchors_SA[mine], self._gamma)

    def _draw(self, draw: int) -> FeatureSequence:
        """The ``draw``-th sequence of the run."""
        epoch, place = divmod(draw, len(self._store))
        return self._sequence(self._permutation(epoch)[place])

    def _permute(self, epoch: int) -> list[int]:
        if epoch == 0:
            return list(range(len(self._store)))
        generator = torch.Generator().manual_seed((2 * self._seed + 1) * _STREAM + epoch)
        order: list[int] = torch.randperm(len(self._store), generator=generator).tolist()
        return order

    def _sequence(self, index: int) -> FeatureSequence:
        shard, place = divmod(index, self._store.shard_size)
        if shard not in self._open:
            self._open[shard] = self._store.shard(shard)
        return self._open[shard][place]
