"""One training run, start to end: steps, evaluations, checkpoints, the exported drafter."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.atomic_file import no_space
from drafter_service.training.checkpoint import load_state, save_state
from drafter_service.training.config import Schedule, TrainConfig
from drafter_service.training.evaluation import Evaluation, evaluate
from drafter_service.training.prefetch import Prefetch
from drafter_service.training.progress import LearningCurve
from drafter_service.training.ranks import joined
from drafter_service.training.run import GENERATED_FEATURES, Run, prepare
from drafter_service.training.step import loss_function, read, update

__all__ = ["GENERATED_FEATURES", "StepReport", "prepare", "train"]


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What a caller hears after every step whose numbers are read (`TrainConfig.log_every`)."""

    steps_done: int
    num_steps: int
    loss: float
    evaluation: Evaluation | None
    """Set when this step ended with one."""


def train(
    config: TrainConfig,
    report: Callable[[StepReport], None] = lambda report: None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> LearningCurve:
    """Train a drafter, or go on where an earlier call with the same settings stopped.

    Started by torchrun, each process takes its share of every step and the curve is the same up
    to rounding; only the first one reports, evaluates and writes checkpoints and drafter.

    Raises:
        DatasetError: the data is missing, empty or of another target.
        ModelNotFound, CheckpointError: no such target, or ``work`` belongs to another run.
        ConfigError: the shape does not fit the target, or a step has fewer sequences than ranks.
        TrainingDiverged: loss or gradient is not finite.
        StorageFull: no room on the disk.
            In both the last checkpoint and the last exported drafter are kept.
    """
    with joined(config.device) as ranks:
        return _train(prepare(config, ranks), report, clock)


def _train(
    run: Run, report: Callable[[StepReport], None], clock: Callable[[], float]
) -> LearningCurve:
    schedule, device = run.config.schedule, run.model.d2t.device
    steps_done, curve, before_s = load_state(
        run.config.work, identity=run.identity, model=run.model, optimiser=run.optimiser
    )
    if run.ranks.is_main and steps_done == schedule.num_steps and not _has_drafter(run):
        _export(run)  # a finished run, asked for its drafter in another place
    loss_of = loss_function(run)
    started_s = clock()
    unread: list[Tensor] = []
    spent = _spent(run, before_s)
    with Prefetch(run.batches, ahead=run.config.packs_ahead, device=device) as packs:
        while steps_done < schedule.num_steps and spent < 1:
            unread.append(update(run, loss_of, packs.get(steps_done), steps_done, spent))
            steps_done += 1
            if steps_done % run.config.log_every and not _due(schedule, steps_done):
                continue
            curve.steps += read(run, steps_done - len(unread), unread)
            unread.clear()
            elapsed_s = before_s + clock() - started_s
            spent = _spent(run, elapsed_s)
            figures = None
            if run.ranks.is_main:
                figures = _after_step(run, curve, steps_done, elapsed_s, is_last=spent >= 1)
                report(
                    StepReport(
                        steps_done=steps_done,
                        num_steps=schedule.num_steps,
                        loss=curve.steps[-1].loss,
                        evaluation=figures,
                    )
                )
    run.ranks.wait()  # the main rank may still be writing
    return curve


def _has_drafter(run: Run) -> bool:
    """False for a run whose output folder was moved or emptied since its last export."""
    return (run.config.output / "model.safetensors").is_file()


def _export(run: Run) -> None:
    with no_space(run.config.output):
        run.architecture.save(run.model, run.config.output, torch.bfloat16)


def _due(schedule: Schedule, steps_done: int) -> bool:
    """Whether an evaluation or a checkpoint comes now."""
    return (
        steps_done == schedule.num_steps
        or steps_done % schedule.evaluate_every == 0
        or steps_done % schedule.checkpoint_every == 0
    )


def _spent(run: Run, elapsed_s: float) -> float:
    """The main rank's share of the time budget that is used up; 0 without a budget."""
    if run.config.time_budget_s is None:
        return 0.0
    return run.ranks.of_main(elapsed_s / run.config.time_budget_s, run.model.d2t.device)


def _after_step(
    run: Run, curve: LearningCurve, steps_done: int, elapsed_s: float, *, is_last: bool
) -> Evaluation | None:
    """Evaluate, export and checkpoint when it is time. The export never waits for a checkpoint."""
    schedule = run.config.schedule
    is_last = is_last or steps_done == schedule.num_steps
    figures = None
    if is_last or steps_done % schedule.evaluate_every == 0:
        figures = evaluate(
            run.model, run.held_out, run.greedy, forward=run.architecture.block_output
        )
        is_best = figures.score > curve.best
        curve.evaluations.append((steps_done, figures))
        if is_best or not _has_drafter(run):
            _export(run)
        curve.write(run.config.work)
    if is_last or steps_done % schedule.checkpoint_every == 0:
        save_state(
            run.config.work,
            identity=run.identity,
            steps_done=steps_done,
            model=run.model,
            optimiser=run.optimiser,
            curve=curve,
            elapsed_s=elapsed_s,
        )
    return figures
