"""One training run, start to end: responses, features, steps, evaluations, the exported drafter."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from cluster.fingerprint import folder_fingerprint
from drafter_service.backbone import DSparkModel
from drafter_service.loading import save_drafter
from drafter_service.training.atomic import no_space
from drafter_service.training.batches import Batches
from drafter_service.training.checkpoint import load_state, run_identity, save_state
from drafter_service.training.config import TrainConfig
from drafter_service.training.dataset import (
    Record,
    load_records,
    response_bigrams,
    response_frequencies,
    split,
)
from drafter_service.training.evaluation import Evaluation, evaluate
from drafter_service.training.features import (
    FeatureSequence,
    FeatureStore,
    StoreKey,
    compute_features,
)
from drafter_service.training.initialisation import drafter_spec, initial_model
from drafter_service.training.loss import Loss, block_output, draft_law, objective
from drafter_service.training.optimiser import Optimiser
from drafter_service.training.packing import Pack
from drafter_service.training.progress import LearningCurve, StepRecord
from drafter_service.training.target import Target
from drafter_service.training.vocabulary import choose_mask_id, choose_vocabulary

SEQUENCES_PER_SHARD = 32


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What a caller hears after every step."""

    steps_done: int
    num_steps: int
    loss: float
    evaluation: Evaluation | None
    """Set when this step ended with one."""


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What stays the same from the first step to the last."""

    config: TrainConfig
    identity: str
    model: DSparkModel
    optimiser: Optimiser
    batches: Batches
    t2d: torch.Tensor
    held_out: Sequence[FeatureSequence]
    greedy: Sequence[bool]


def train(
    config: TrainConfig, report: Callable[[StepReport], None] = lambda report: None
) -> LearningCurve:
    """Train a drafter, or go on where an earlier call with the same settings stopped.

    Raises:
        DatasetError: the data is missing, empty or of another target.
        ModelNotFound, CheckpointError: no such target, or ``work`` belongs to another run.
        TrainingDiverged: loss or gradient is not finite.
        StorageFull: no room on the disk.
            In both the last checkpoint and the last exported drafter are kept.
    """
    run = _prepare(config)
    steps_done, curve = load_state(
        config.work, identity=run.identity, model=run.model, optimiser=run.optimiser
    )
    for step in range(steps_done, config.schedule.num_steps):
        record = _step(run, step)
        curve.steps.append(record)
        figures = _after_step(run, curve, step + 1)
        report(
            StepReport(
                steps_done=step + 1,
                num_steps=config.schedule.num_steps,
                loss=record.loss,
                evaluation=figures,
            )
        )
    return curve


def _prepare(config: TrainConfig) -> _Run:
    target = Target(config.target, device=config.device)
    vocab_size = target.config.vocab_size
    records = load_records(config.data, vocab_size=vocab_size, max_length=config.max_length)
    training, held_out = split(records, num_held_out=config.num_held_out, seed=config.seed)
    frequencies = response_frequencies(training)
    special = target.special_ids()
    vocabulary = choose_vocabulary(
        frequencies, special, vocab_size=vocab_size, size=config.shape.draft_vocab_size
    )
    bigrams = response_bigrams(training, vocabulary.t2d)
    training = training[: config.max_sequences]  # counting is cheap, features are not
    spec = drafter_spec(target, config.shape, choose_mask_id(frequencies, special, vocab_size))
    stores = {
        name: _store(config, name, part, spec.target_layer_ids, target)
        for name, part in (("train", training), ("held-out", held_out))
    }
    model = initial_model(spec, target, vocabulary.d2t, bigrams, config.seed)
    return _Run(
        config=config,
        identity=run_identity(config, folder_fingerprint(config.target), _digest(records)),
        model=model,
        optimiser=Optimiser(model, config.schedule),
        batches=Batches(
            stores["train"],
            sequences_per_step=config.schedule.sequences_per_step,
            anchors_per_sequence=config.schedule.anchors_per_sequence,
            gamma=spec.gamma,
            seed=config.seed,
        ),
        t2d=vocabulary.t2d.to(model.d2t.device),
        held_out=stores["held-out"].all(),
        greedy=[record.temperature == 0 for record in held_out],
    )


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
    compute = partial(compute_features, target, target_layer_ids=taps)
    return FeatureStore(config.work / "features" / name, records, key, compute)


def _digest(records: Sequence[Record]) -> str:
    digest = hashlib.sha256()
    for record in records:
        digest.update(repr((record.prompt, record.response, record.temperature)).encode())
    return digest.hexdigest()


def _step(run: _Run, step: int) -> StepRecord:
    batch = run.batches.pack(step).to(run.model.d2t.device)
    loss = _loss(run, batch)
    norm = run.optimiser.update(loss.total, step)
    return StepRecord(
        step=step,
        loss=loss.total.item(),
        cross_entropy=loss.cross_entropy.item(),
        total_variation=loss.total_variation.item(),
        confidence=loss.confidence.item(),
        gradient_norm=norm,
    )


def _loss(run: _Run, batch: Pack) -> Loss:
    with torch.no_grad():
        law_BGV = draft_law(run.model, batch)
    half = run.config.precision == "bf16"
    with torch.autocast(run.model.d2t.device.type, torch.bfloat16, enabled=half):
        output = block_output(run.model, batch)
    return objective(output, law_BGV, batch, run.t2d, run.config.loss)


def _after_step(run: _Run, curve: LearningCurve, steps_done: int) -> Evaluation | None:
    """Evaluate, export and checkpoint when it is time. The export never waits for a checkpoint."""
    schedule = run.config.schedule
    is_last = steps_done == schedule.num_steps
    figures = None
    if is_last or steps_done % schedule.evaluate_every == 0:
        figures = evaluate(run.model, run.held_out, run.greedy)
        is_best = figures.score > curve.best
        curve.evaluations.append((steps_done, figures))
        if is_best:
            with no_space(run.config.output):
                save_drafter(run.model, run.config.output, dtype=torch.bfloat16)
        curve.write(run.config.work)
    if is_last or steps_done % schedule.checkpoint_every == 0:
        save_state(
            run.config.work,
            identity=run.identity,
            steps_done=steps_done,
            model=run.model,
            optimiser=run.optimiser,
            curve=curve,
        )
    return figures
