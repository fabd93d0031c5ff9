"""From prompts to training data: text side, torch engine and response log, put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.drafter_checkpoint import target_config
from cluster.errors import ModelNotFound
from cluster.fingerprint import folder_fingerprint
from cluster.prompt_file import read_prompts
from deploy.generation import GenerationConfig, open_generator
from deploy.offline.prompts import prompt_ids
from deploy.text_model import load_text_model
from drafter_service.training.collection import CollectionProgress, collect
from drafter_service.training.initialisation import tapped_layers
from drafter_service.training.responses import ResponseLog, ResponseSettings, plan
from drafter_service.training.shards import GeneratedFeatures


@dataclass(frozen=True, kw_only=True)
class Generated:
    """What there is after a run."""

    num_responses: int
    """Of those asked for; fewer than `num_tasks` where the budget ended the run."""
    num_tasks: int
    num_prompts: int
    num_too_long: int
    """Prompts left out because they leave no room for a response."""


def generate_responses(
    *,
    target: Path,
    prompts: Path,
    log: Path,
    settings: ResponseSettings,
    generation: GenerationConfig,
    features: Path | None = None,
    taps: tuple[int, ...] | None = None,
    report: Callable[[CollectionProgress], None] = lambda progress: None,
    budget_s: float | None = None,
) -> Generated:
    """Have the target answer every prompt; what ``log`` holds already is not asked again.

    Args:
        target: Hugging Face folder.
        prompts: a prompt file (`cluster.prompt_file`).
        log: data for `drafter_service.training.trainer.train`.
        features: folder to keep training features in; None keeps none.
        taps: layers of those features; None: what training taps by default.
        budget_s: begin no further response after so many seconds.

    Raises:
        ModelNotFound, CheckpointError, Unsupported: a target that cannot be served, or a log of
            another one or of other settings.
        ConfigError: a tap outside the target.
        PromptFileError, DatasetError: no prompts, or none that leaves room for a response.
        StorageFull: no room; what is written is kept.
    """
    asked = read_prompts(prompts)
    if not (target / "config.json").is_file():
        raise ModelNotFound(f"no target model at {target}", hint="pass a Hugging Face folder")
    text = load_text_model(target)
    layers = None
    if features is not None:
        layers = tapped_layers(taps, int(target_config(target)["num_hidden_layers"]))
    planned = plan(asked, lambda words: prompt_ids(words, text), settings)
    fingerprint = folder_fingerprint(target)
    responses = ResponseLog(log, target=fingerprint, settings=settings)
    if responses.missing(planned.tasks) and (budget_s is None or budget_s > 0):
        kept = None
        if features is not None and layers is not None:
            kept = GeneratedFeatures(features, target=fingerprint, target_layer_ids=layers)
        collect(
            planned.tasks,
            open_generator(target, generation, target_layer_ids=layers),
            responses,
            features=kept,
            report=report,
            budget_s=budget_s,
        )
    return Generated(
        num_responses=len(planned.tasks) - len(responses.missing(planned.tasks)),
        num_tasks=len(planned.tasks),
        num_prompts=len(asked),
        num_too_long=planned.num_too_long,
    )
