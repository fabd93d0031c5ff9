"""Training on the command line: arguments, progress display, the call into the trainer.

`dspark.commands.train` is the whole command. Importing this module is cheap: `run` loads torch.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from drafter_service.training.config import (
    DrafterKind,
    DrafterShape,
    LossWeights,
    Schedule,
    TrainConfig,
)

if TYPE_CHECKING:
    from rich.progress import Progress

    from drafter_service.training.trainer import StepReport


def add_arguments(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Declare the arguments of training; the defaults are those of `TrainConfig`.

    Returns:
        The group of ``--data``, for other ways to have training data.
    """
    paths = parser.add_argument_group("paths")
    paths.add_argument("--target", type=Path, required=True, help="target, a Hugging Face folder")
    data = paths.add_mutually_exclusive_group(required=True)
    data.add_argument("--data", type=Path, help="the target's responses, .jsonl or .jsonl.gz")
    paths.add_argument(
        "--work", type=Path, required=True, help="features, checkpoints, curves; resumes from here"
    )
    paths.add_argument(
        "--output",
        type=Path,
        required=True,
        help="best drafter so far (DeepSpec format)",
    )
    paths.add_argument(
        "--start-from", type=Path, metavar="DRAFTER", help="go on from the weights of this drafter"
    )
    shape = parser.add_argument_group("drafter")
    shape.add_argument("--kind", choices=get_args(DrafterKind), default=DrafterShape.kind)
    shape.add_argument("--layers", type=int, default=DrafterShape.num_layers)
    shape.add_argument("--gamma", type=int, default=DrafterShape.gamma, help="tokens a block")
    shape.add_argument(
        "--head",
        choices=("vanilla", "gated", "rnn", "none"),
        default=None,
        help=f"default {DrafterShape.head}; an autoregressive drafter has none",
    )
    shape.add_argument(
        "--markov-rank", type=int, default=None, help=f"default {DrafterShape.markov_rank}"
    )
    shape.add_argument("--draft-vocab", type=int, default=DrafterShape.draft_vocab_size)
    shape.add_argument(
        "--taps",
        type=int,
        nargs="+",
        default=None,
        help="target layers; default: five, spread",
    )
    schedule = parser.add_argument_group("schedule")
    schedule.add_argument("--steps", type=int, default=Schedule.num_steps)
    schedule.add_argument("--sequences-per-step", type=int, default=Schedule.sequences_per_step)
    schedule.add_argument("--anchors", type=int, default=Schedule.anchors_per_sequence)
    schedule.add_argument("--learning-rate", type=float, default=Schedule.learning_rate)
    schedule.add_argument("--evaluate-every", type=int, default=Schedule.evaluate_every)
    schedule.add_argument("--checkpoint-every", type=int, default=Schedule.checkpoint_every)
    schedule.add_argument("--held-out", type=int, default=TrainConfig.num_held_out)
    schedule.add_argument(
        "--max-sequences", type=int, default=None, help="train on this many only; default: all"
    )
    schedule.add_argument(
        "--ce-weight", type=float, default=LossWeights.cross_entropy, help="of equation 12"
    )
    schedule.add_argument(
        "--distillation-weight", type=float, default=LossWeights.distillation, help="0: the paper's"
    )
    schedule.add_argument("--max-length", type=int, default=TrainConfig.max_length)
    schedule.add_argument("--seed", type=int, default=TrainConfig.seed)
    schedule.add_argument("--device", default=TrainConfig.device)
    schedule.add_argument("--precision", choices=("fp32", "bf16"), default=TrainConfig.precision)
    schedule.add_argument(
        "--compile",
        nargs="?",
        const="inductor",
        default=None,
        metavar="BACKEND",
        help="torch.compile the step; the first steps take minutes",
    )
    schedule.add_argument("--log-every", type=int, default=TrainConfig.log_every)
    schedule.add_argument(
        "--prefetch", type=int, default=None, help="packs made ahead; default: 4 on CUDA, else 0"
    )
    schedule.add_argument(
        "--budget-s", type=float, default=None, help="end after so many seconds of steps"
    )
    return data


def config_from(args: argparse.Namespace) -> TrainConfig:
    """The run that parsed arguments ask for.

    Raises:
        ConfigError: a value is out of range.
    """
    head = args.head or ("none" if args.kind == "autoregressive" else DrafterShape.head)
    rank = args.markov_rank
    if rank is None:
        rank = 0 if head == "none" else DrafterShape.markov_rank
    return TrainConfig(
        target=args.target,
        data=args.data,
        work=args.work,
        output=args.output,
        start_from=args.start_from,
        shape=DrafterShape(
            kind=args.kind,
            num_layers=args.layers,
            gamma=args.gamma,
            head=head,
            markov_rank=rank,
            draft_vocab_size=args.draft_vocab,
            target_layer_ids=tuple(args.taps) if args.taps else None,
        ),
        schedule=Schedule(
            num_steps=args.steps,
            sequences_per_step=args.sequences_per_step,
            anchors_per_sequence=args.anchors,
            learning_rate=args.learning_rate,
            evaluate_every=args.evaluate_every,
            checkpoint_every=args.checkpoint_every,
        ),
        loss=LossWeights(cross_entropy=args.ce_weight, distillation=args.distillation_weight),
        seed=args.seed,
        max_sequences=args.max_sequences,
        num_held_out=args.held_out,
        max_length=args.max_length,
        device=args.device,
        precision=args.precision,
        compile_backend=args.compile,
        log_every=args.log_every,
        num_prefetch=args.prefetch,
        time_budget_s=args.budget_s,
    )


def progress_bar(*, shown: bool = True) -> Progress:
    """A bar with a count and the time that is left."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        disable=not shown,
    )


def run(config: TrainConfig) -> int:
    """Train, showing progress. Returns the exit status; errors are raised for the CLI to show."""
    from drafter_service.training.ranks import joined
    from drafter_service.training.trainer import train

    with joined(config.device) as ranks, progress_bar(shown=ranks.is_main) as bar:
        task = bar.add_task("preparing", total=config.schedule.num_steps)

        def show(report: StepReport) -> None:
            bar.update(task, completed=report.steps_done, description=f"loss {report.loss:.3f}")
            if report.evaluation is not None:
                bar.console.print(summary(report))

        train(config, show)
    if ranks.is_main:
        print(f"drafter written to {config.output}, learning curve to {config.work}")
    return 0


def summary(report: StepReport) -> str:
    """One line of figures for a step that ended with an evaluation."""
    figures = report.evaluation
    assert figures is not None
    greedy = "" if figures.greedy_length is None else f"{figures.greedy_length:.2f} greedy, "
    acceptance = " ".join(f"{value:.2f}" for value in figures.acceptance)
    return (
        f"step {report.steps_done}: accepted length {greedy}{figures.expected_length:.2f} at "
        f"temperature 1; acceptance by position {acceptance}"
    )
