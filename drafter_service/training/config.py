"""What one training run is: the drafter's shape, the schedule, the folders."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cluster.drafter_spec import HeadKind
from cluster.errors import ConfigError

DrafterKind = Literal["dspark", "autoregressive"]


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """The choices that the target does not make for us (paper section 3.1)."""

    kind: DrafterKind = "dspark"
    """``dspark`` drafts a block in parallel; with head ``none`` it is DFlash. ``autoregressive``
    (EAGLE-3 type) drafts token by token through one layer; with gamma 1 it is MTP-1."""
    num_layers: int = 1
    gamma: int = 5
    head: HeadKind = "vanilla"
    markov_rank: int = 64
    """0 exactly when ``head`` is ``none``."""
    draft_vocab_size: int = 4096
    """Rows of the draft head; capped at the target's vocabulary."""
    target_layer_ids: tuple[int, ...] | None = None
    """Tapped target layers; None spreads five of them, ending at the last layer's input."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "gamma", "draft_vocab_size"):
            _at_least_one(f"shape.{name}", getattr(self, name))
        if (self.head == "none") != (self.markov_rank == 0) or self.markov_rank < 0:
            raise ConfigError(
                f"shape.markov_rank = {self.markov_rank} with head {self.head!r}",
                hint="head `none` has rank 0, every other head a positive rank",
            )
        if self.kind == "autoregressive" and (self.num_layers, self.head) != (1, "none"):
            raise ConfigError(
                f"shape: {self.num_layers} layers with head {self.head!r}",
                hint="an autoregressive drafter has one layer and head `none`",
            )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Batches and learning rate."""

    num_steps: int = 3000
    sequences_per_step: int = 8
    anchors_per_sequence: int = 24
    learning_rate: float = 1e-3
    """Peak, reached after the warm-up; falls along a cosine to a twentieth."""
    warmup_fraction: float = 0.04
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    evaluate_every: int = 100
    """Steps between evaluations, which also export the drafter when it is the best so far."""
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        names = ("num_steps", "sequences_per_step", "anchors_per_sequence")
        for name in (*names, "evaluate_every", "checkpoint_every"):
            _at_least_one(f"schedule.{name}", getattr(self, name))
        for name in ("learning_rate", "clip_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"schedule.{name} = {getattr(self, name)} must be positive and finite"
                )
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"schedule.weight_decay = {self.weight_decay} must be 0 or more")
        if not 0 <= self.warmup_fraction < 1:
            raise ConfigError(f"schedule.warmup_fraction = {self.warmup_fraction} is not in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """Equation 12 and the position weights; the defaults are the paper's."""

    cross_entropy: float = 0.1
    """Against the ids of the text (equation 9)."""
    distillation: float = 0.0
    """Cross-entropy against the target's whole law: equation 9's mean, without its noise."""
    total_variation: float = 0.9
    confidence: float = 1.0
    position_decay: float = 4.0
    """Position k weighs exp(-(k - 1) / position_decay)."""

    def __post_init__(self) -> None:
        for name in ("cross_entropy", "distillation", "total_variation", "confidence"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"loss.{name} = {getattr(self, name)} must be 0 or more, finite")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One run of `drafter_service.training.trainer.train`."""

    target: Path
    """Hugging Face folder of the target."""
    data: Path
    """Responses of the target (see `dataset`)."""
    work: Path
    """Feature shards, checkpoints and curves; a run started again here goes on."""
    output: Path
    """Where the best drafter so far is exported (DeepSpec format)."""
    shape: DrafterShape = field(default_factory=DrafterShape)
    start_from: Path | None = None
    """A drafter of this very shape: the run begins with its weights and its draft vocabulary."""
    schedule: Schedule = field(default_factory=Schedule)
    loss: LossWeights = field(default_factory=LossWeights)
    seed: int = 0
    num_held_out: int = 64
    """Prompts kept for evaluation."""
    max_sequences: int | None = None
    """Train on this many sequences only (a random choice): features cost more than steps do."""
    max_length: int = 1024
    """Longest sequence, prompt included."""
    device: str = "cpu"
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the matrix products in training; laws, losses and weights stay fp32."""
    compile_backend: str | None = None
    """Of torch.compile, e.g. ``inductor``; None runs as written."""
    log_every: int = 1
    """Steps between looks at the losses; each look makes a GPU wait."""
    num_prefetch: int | None = None
    """Packs made ahead in threads; None: 4 on CUDA, 0 elsewhere."""
    time_budget_s: float | None = None
    """End after so many seconds of steps, earlier calls included, with the learning rate falling
    by the clock where that is further than the steps."""

    def __post_init__(self) -> None:
        for name in ("target", "work", "start_from"):
            other = getattr(self, name)
            if other is not None and other.resolve() == self.output.resolve():
                raise ConfigError(
                    f"{name} and output are the same folder, {self.output}",
                    hint="the drafter is written to output, over what is there",
                )
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"seed = {self.seed} is not in 0..2**63-1")
        _at_least_one("max_length", self.max_length)
        _at_least_one("num_held_out", self.num_held_out)
        if self.max_sequences is not None:
            _at_least_one("max_sequences", self.max_sequences)
        _at_least_one("log_every", self.log_every)
        if self.num_prefetch is not None and self.num_prefetch < 0:
            raise ConfigError(f"num_prefetch = {self.num_prefetch} is negative")
        if self.time_budget_s is not None and not self.time_budget_s > 0:
            raise ConfigError(f"time_budget_s = {self.time_budget_s} must be positive")
        if self.precision not in ("fp32", "bf16"):
            raise ConfigError(f"precision {self.precision!r} is neither fp32 nor bf16")

    @property
    def packs_ahead(self) -> int:
        """`num_prefetch`, settled."""
        if self.num_prefetch is not None:
            return self.num_prefetch
        return 4 if self.device.startswith("cuda") else 0


def _at_least_one(path: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{path} = {value} must be at least 1")
