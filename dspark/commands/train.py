"""`dspark train`: from prompts, or from responses that exist, to a drafter."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.config import VerifierConfig
from cluster.environment import use_threads
from cluster.errors import ConfigError
from drafter_service.training import arguments, command

if TYPE_CHECKING:
    from deploy.generation import GenerationConfig
    from drafter_service.training.config import TrainConfig
    from drafter_service.training.responses import ResponseSettings

RESPONSES = "responses.jsonl"
"""Inside the work folder: what the target answered."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments: those of training, and how to have responses made."""
    source = arguments.add_arguments(parser)
    source.add_argument(
        "--prompts", type=Path, help="prompts, .jsonl; the target answers them first"
    )
    group = parser.add_argument_group("responses (with --prompts)")
    group.add_argument(
        "--temperatures",
        type=float,
        nargs="+",
        default=[0.0, 0.7, 1.0],
        metavar="T",
        help="a response at each; 0 is greedy",
    )
    group.add_argument("--samples", type=int, default=1, help="per prompt and temperature above 0")
    group.add_argument("--max-new-tokens", type=int, default=256, help="longest response")
    group.add_argument("--requests", type=int, default=128, help="decoded at once")
    group.add_argument("--kv-tokens", type=int, default=57344, help="target KV, over all requests")
    group.add_argument("--threads", type=int, default=0, help="of torch; 0: its own choice")
    group.add_argument(
        "--generate-budget-s",
        type=float,
        default=math.inf,
        help="begin no response after so many seconds, by default never; training takes what "
        "there is",
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
        return command.run(arguments.config_from(args))
    _check(args)
    config = replace(arguments.config_from(args), data=args.work / RESPONSES)
    settings, generation = _settings(args, config), _generation(args, config)
    from drafter_service.checkpoint_folder import check_training_output
    from drafter_service.training.ranks import joined

    if not args.responses_only:
        check_training_output(config.output)  # hours before it is written
    with joined(config.device) as ranks:
        with ranks.main_first():
            if ranks.is_main:
                _generate(args, config, settings, generation)
        return 0 if args.responses_only else command.run(config)


def _check(args: argparse.Namespace) -> None:
    """Raises `ConfigError` for a flag out of range; nothing is written yet."""
    least = {
        "samples": 1,
        "max_new_tokens": 2,
        "requests": 1,
        "kv_tokens": VerifierConfig.kv_block_tokens,
    }
    for name, low in least.items():
        value = getattr(args, name)
        if value < low:
            raise ConfigError(f"--{name.replace('_', '-')}: {value}", hint=f"at least {low}")
    if not args.generate_budget_s >= 0:  # nan too
        raise ConfigError(f"--generate-budget-s: {args.generate_budget_s}", hint="0 or more")
    if args.threads:
        use_threads(args.threads)


def _settings(args: argparse.Namespace, config: TrainConfig) -> ResponseSettings:
    from drafter_service.training.responses import ResponseSettings

    return ResponseSettings(
        temperatures=tuple(args.temperatures),
        samples=args.samples,
        max_new_tokens=args.max_new_tokens,
        max_length=config.max_length,
        seed=config.seed,
    )


def _generation(args: argparse.Namespace, config: TrainConfig) -> GenerationConfig:
    from deploy.generation import GenerationConfig

    return GenerationConfig(
        max_requests=args.requests,
        max_step_tokens=max(512, 2 * args.requests),
        kv_tokens=args.kv_tokens,
        max_model_len=config.max_length,
        device=config.device,
        num_threads=args.threads,
    )


def _generate(
    args: argparse.Namespace,
    config: TrainConfig,
    settings: ResponseSettings,
    generation: GenerationConfig,
) -> None:
    from deploy.training import generate_responses
    from drafter_service.training.collection import CollectionProgress
    from drafter_service.training.trainer import GENERATED_FEATURES

    with command.progress_bar() as bar:
        task = bar.add_task("responses", total=None)

        def show(progress: CollectionProgress) -> None:
            bar.update(
                task,
                completed=progress.num_done,
                total=progress.num_tasks,
                description=f"responses, {progress.num_tokens:,} tokens",
            )

        generated = generate_responses(
            target=config.target,
            prompts=args.prompts,
            log=config.data,
            settings=settings,
            generation=generation,
            features=config.work / GENERATED_FEATURES if args.keep_features else None,
            taps=config.shape.target_layer_ids,
            report=show,
            budget_s=args.generate_budget_s,
        )
    print(
        f"{generated.num_responses} of {generated.num_tasks} responses are in {config.data}; "
        f"{generated.num_too_long} of {generated.num_prompts} prompts were left out as too long "
        f"for --max-length {config.max_length}"
    )
