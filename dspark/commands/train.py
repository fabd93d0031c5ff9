"""`dspark train`: from prompts, or from responses that exist, to a drafter."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import ConfigError
from drafter_service.training import command

if TYPE_CHECKING:
    from drafter_service.training.config import TrainConfig

RESPONSES = "responses.jsonl"
"""Inside the work folder: what the target answered."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments: those of training, and how to have responses made."""
    source = command.add_arguments(parser)
    source.add_argument(
        "--prompts", type=Path, help="prompts, .jsonl; the target answers them first"
    )
    group = parser.add_argument_group("responses (with --prompts)")
    group.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    group.add_argument("--samples", type=int, default=1, help="per prompt and temperature above 0")
    group.add_argument("--max-new-tokens", type=int, default=256)
    group.add_argument("--requests", type=int, default=128, help="decoded at once")
    group.add_argument("--kv-tokens", type=int, default=57344, help="target KV, over all requests")
    group.add_argument("--threads", type=int, default=0, help="of torch; 0: its own choice")
    group.add_argument(
        "--generate-budget-s",
        type=float,
        default=math.inf,
        help="begin no response after so many seconds; training takes what there is",
    )
    group.add_argument(
        "--keep-features",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the target's hidden states while it answers: no second forward, more disk",
    )
    group.add_argument(
        "--responses-only", action="store_true", help="stop when the responses are there"
    )


def run(args: argparse.Namespace) -> int:
    """Generate where prompts are given, then train. Errors are raised for the CLI to show."""
    if args.prompts is None:
        if args.responses_only:
            raise ConfigError("--responses-only without --prompts")
        return command.run(command.config_from(args))
    config = replace(command.config_from(args), data=args.work / RESPONSES)
    from drafter_service.training.ranks import joined

    with joined(config.device) as ranks:
        with ranks.main_first():
            if ranks.is_main:
                _generate(args, config)
        return 0 if args.responses_only else command.run(config)


def _generate(args: argparse.Namespace, config: TrainConfig) -> None:
    from deploy.generation import GenerationConfig
    from deploy.training import generate_responses
    from drafter_service.training.collection import CollectionProgress
    from drafter_service.training.responses import ResponseSettings
    from drafter_service.training.trainer import GENERATED_FEATURES

    settings = ResponseSettings(
        temperatures=tuple(args.temperatures),
        samples=args.samples,
        max_new_tokens=args.max_new_tokens,
        max_length=config.max_length,
        seed=config.seed,
    )
    with command.progress_bar() as bar:
        task = bar.add_task("responses", total=None)

        def show(progress: CollectionProgress) -> None:
            bar.update(
                task,
                completed=progress.num_done,
                total=progress.num_tasks,
                description=f"responses, {progress.num_tokens:,} tokens",
            )

        generate_responses(
            target=config.target,
            prompts=args.prompts,
            log=config.data,
            settings=settings,
            generation=GenerationConfig(
                max_requests=args.requests,
                max_step_tokens=max(512, 2 * args.requests),
                kv_tokens=args.kv_tokens,
                max_model_len=config.max_length,
                device=config.device,
                num_threads=args.threads,
            ),
            features=config.work / GENERATED_FEATURES if args.keep_features else None,
            taps=config.shape.target_layer_ids,
            report=show,
            budget_s=args.generate_budget_s,
        )
