"""Everything that a run needs before its first step, put together from its configuration."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from cluster.fingerprint import folder_fingerprint
from drafter_service.checkpoint_folder import check_training_output
from drafter_service.training.architecture import Architecture, Start, architecture_of
from drafter_service.training.batches import Batches
from drafter_service.training.checkpoint import run_identity
from drafter_service.training.config import TrainConfig
from drafter_service.training.dataset import (
    Record,
    load_records,
    response_bigrams,
    response_frequencies,
    split,
)
from drafter_service.training.draft_model import DraftModel
from drafter_service.training.features import FeatureStore, StoreKey, compute_features
from drafter_service.training.optimiser import Optimiser
from drafter_service.training.ranks import Ranks
from drafter_service.training.shards import FeatureSequence, GeneratedFeatures
from drafter_service.training.target import Target
from drafter_service.training.vocabulary import (
    choose_mask_id,
    choose_vocabulary,
    vocabulary_of,
)

SEQUENCES_PER_SHARD = 32
GENERATED_FEATURES = "generated"
"""Folder, inside the work folder, of the features kept while responses were generated."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What stays the same from the first step to the last."""

    config: TrainConfig
    identity: str
    ranks: Ranks
    architecture: Architecture
    model: DraftModel
    optimiser: Optimiser
    batches: Batches
    t2d: torch.Tensor
    held_out: Sequence[FeatureSequence]
    """Empty on ranks that do not evaluate."""
    greedy: Sequence[bool]
    """Of each held-out sequence: its response is the target's greedy one."""


def prepare(config: TrainConfig, ranks: Ranks | None = None) -> Run:
    """Read target and data, compute the features that are needed at once, start a model.

    Raises:
        DatasetError, ModelNotFound, CheckpointError, ConfigError, StorageFull: see `train`.
    """
    ranks = ranks or Ranks()
    check_training_output(config.output)
    target = Target(config.target, device=config.device)
    vocab_size = target.config.vocab_size
    records = load_records(config.data, vocab_size=vocab_size, max_length=config.max_length)
    training, held_out = split(records, num_held_out=config.num_held_out, seed=config.seed)
    architecture = architecture_of(config.shape.kind)
    if config.start_from is None:
        model = architecture.initial_model(target, _start(config, target, training))
    else:
        model = architecture.load(config.start_from, target, config.shape)
    vocabulary = vocabulary_of(model.d2t.tolist(), vocab_size)
    training = training[: config.max_sequences]  # counting is cheap, features are not
    stores = _stores(config, ranks, model, target, training, held_out)
    return Run(
        config=config,
        identity=run_identity(config, folder_fingerprint(config.target), _digest(records)),
        ranks=ranks,
        architecture=architecture,
        model=model,
        optimiser=Optimiser(model, config.schedule, ranks),
        batches=Batches(
            stores["train"],
            sequences_per_step=config.schedule.sequences_per_step,
            anchors_per_sequence=config.schedule.anchors_per_sequence,
            gamma=model.spec.gamma,
            seed=config.seed,
            ranks=ranks,
        ),
        t2d=vocabulary.t2d.to(model.d2t.device),
        held_out=stores["held-out"].all() if ranks.is_main else (),
        greedy=[record.temperature == 0 for record in held_out] if ranks.is_main else (),
    )


def _start(config: TrainConfig, target: Target, training: Sequence[Record]) -> Start:
    """What the replies say about where to start."""
    vocab_size = target.config.vocab_size
    frequencies, special = response_frequencies(training), target.special_ids()
    vocabulary = choose_vocabulary(
        frequencies, special, vocab_size=vocab_size, size=config.shape.draft_vocab_size
    )
    return Start(
        shape=config.shape,
        mask_token_id=choose_mask_id(frequencies, special, vocab_size),
        d2t=vocabulary.d2t,
        bigrams=response_bigrams(training, vocabulary.t2d),
        seed=config.seed,
    )


def _stores(
    config: TrainConfig,
    ranks: Ranks,
    model: DraftModel,
    target: Target,
    training: Sequence[Record],
    held_out: Sequence[Record],
) -> dict[str, FeatureStore]:
    """Both feature stores. Filled at once, each rank its share, unless one process fills lazily."""
    with ranks.main_first():
        stores = {
            name: _store(config, name, part, model.spec.target_layer_ids, target)
            for name, part in (("train", training), ("held-out", held_out))
        }
    if ranks.num > 1 or config.packs_ahead:
        for store in stores.values():
            store.fill(range(ranks.rank, store.num_shards, ranks.num))
        ranks.wait()
    return stores


def _store(
    config: TrainConfig,
    name: str,
    records: Sequence[Record],
    taps: tuple[int, ...],
    target: Target,
) -> FeatureStore:
    key = StoreKey(
        target=folder_fingerprint(config.target),
        data=_digest(records),
        target_layer_ids=taps,
        shard_size=SEQUENCES_PER_SHARD,
    )
    generated = GeneratedFeatures(
        config.work / GENERATED_FEATURES, target=key.target, target_layer_ids=taps
    )
    compute = partial(compute_features, target, target_layer_ids=taps)
    return FeatureStore(config.work / "features" / name, records, key, compute, generated)


def _digest(records: Sequence[Record]) -> str:
    digest = hashlib.sha256()
    for record in records:
        digest.update(repr((record.prompt, record.response, record.temperature)).encode())
    return digest.hexdigest()
