"""Arguments of training: what they are called, and the `TrainConfig` that they ask for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from drafter_service.training.config import (
    DrafterKind,
    DrafterShape,
    LossWeights,
    Schedule,
    TrainConfig,
)


def add_arguments(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Declare the arguments of training; the defaults are those of `TrainConfig`.

    Returns:
        The group of ``--data``, for other ways to have training data.
    """
    data = _add_paths(parser)
    _add_shape(parser)
    _add_schedule(parser)
    _add_machine(parser)
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


def _add_paths(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
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
    return data


def _add_shape(parser: argparse.ArgumentParser) -> None:
    shape = parser.add_argument_group("drafter")
    shape.add_argument(
        "--kind",
        choices=get_args(DrafterKind),
        default=DrafterShape.kind,
        help="dspark: blocks in parallel; autoregressive: token by token (EAGLE-3 type, MTP-1)",
    )
    shape.add_argument("--layers", type=int, default=DrafterShape.num_layers, help="of the drafter")
    shape.add_argument("--gamma", type=int, default=DrafterShape.gamma, help="tokens a block")
    shape.add_argument(
        "--head",
        choices=("vanilla", "gated", "rnn", "none"),
        default=None,
        help=f"sequential head, default {DrafterShape.head}; an autoregressive drafter has none",
    )
    shape.add_argument(
        "--markov-rank",
        type=int,
        default=None,
        help=f"of the head, default {DrafterShape.markov_rank}",
    )
    shape.add_argument(
        "--draft-vocab",
        type=int,
        default=DrafterShape.draft_vocab_size,
        metavar="N",
        help="ids that can be drafted, the commonest",
    )
    shape.add_argument(
        "--taps",
        type=int,
        nargs="+",
        default=None,
        help="target layers; default: five, spread",
    )


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    schedule = parser.add_argument_group("schedule")
    schedule.add_argument("--steps", type=int, default=Schedule.num_steps, help="of the optimiser")
    schedule.add_argument(
        "--sequences-per-step",
        type=int,
        default=Schedule.sequences_per_step,
        help="batch, over all ranks",
    )
    schedule.add_argument(
        "--anchors",
        type=int,
        default=Schedule.anchors_per_sequence,
        help="blocks trained in each sequence of a step",
    )
    schedule.add_argument(
        "--learning-rate",
        type=float,
        default=Schedule.learning_rate,
        help="peak, after the warm-up; then a cosine",
    )
    schedule.add_argument(
        "--evaluate-every",
        type=int,
        default=Schedule.evaluate_every,
        help="steps; the best drafter so far is written then",
    )
    schedule.add_argument(
        "--checkpoint-every",
        type=int,
        default=Schedule.checkpoint_every,
        help="steps; a killed run goes on from there",
    )
    schedule.add_argument(
        "--held-out", type=int, default=TrainConfig.num_held_out, help="prompts kept for evaluation"
    )
    schedule.add_argument(
        "--max-sequences", type=int, default=None, help="train on this many only; default: all"
    )
    schedule.add_argument(
        "--ce-weight", type=float, default=LossWeights.cross_entropy, help="of equation 12"
    )
    schedule.add_argument(
        "--distillation-weight", type=float, default=LossWeights.distillation, help="0: the paper's"
    )
    schedule.add_argument(
        "--max-length",
        type=int,
        default=TrainConfig.max_length,
        help="tokens of a sequence, prompt included",
    )
    schedule.add_argument(
        "--seed",
        type=int,
        default=TrainConfig.seed,
        help="of responses, weights, batches and anchors",
    )
    schedule.add_argument(
        "--budget-s",
        type=float,
        default=None,
        help="end after so many seconds of steps; default: never",
    )


def _add_machine(parser: argparse.ArgumentParser) -> None:
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", default=TrainConfig.device, help="as torch names it")
    machine.add_argument(
        "--precision",
        choices=("fp32", "bf16"),
        default=TrainConfig.precision,
        help="of matrix products",
    )
    machine.add_argument(
        "--compile",
        nargs="?",
        const="inductor",
        default=None,
        metavar="BACKEND",
        help="torch.compile the step; the first steps take minutes",
    )
    machine.add_argument(
        "--log-every",
        type=int,
        default=TrainConfig.log_every,
        help="steps between looks at the loss",
    )
    machine.add_argument(
        "--prefetch", type=int, default=None, help="packs made ahead; default: 4 on CUDA, else 0"
    )
