"""Responses of a target at full speed: our torch engine, driven without router and drafter.

Requests come and go while the batch runs (continuous batching): each step carries a row without
drafts for every request in hand, and as many new prompts as there is room for. A row without
drafts is plain seeded sampling in either acceptance mode.

What the engine computes anyway can be kept on the way (`deploy.kept_rows`): it is all that a
drafter is trained on, so no second forward is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cluster.config import ModelConfig, VerifierConfig
from cluster.environment import use_threads
from cluster.errors import error_for
from cluster.sampling import plain_sampling
from cluster.wire import Admission, Step, StepResult
from deploy.kept_rows import KeptRows, RawRows
from deploy.text_model import load_text_model
from drafter_service.training.responses import Response, ResponseTask
from verifier_service.torch_engine.engine import TorchEngine
from verifier_service.torch_engine.loading import engine_limits, load_target, resolve_device


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How much is decoded at once, and where."""

    max_requests: int = 128
    max_step_tokens: int = 512
    kv_tokens: int = 57344
    """Target KV over all requests: 46 kB a position in fp32 for the embedded target."""
    max_model_len: int = 1024
    device: str = "cpu"
    dtype: str = "float32"
    """Weights and states; features for training want fp32."""
    num_threads: int = 0
    """Torch's, 0 leaves them as they are."""


@dataclass(kw_only=True)
class _Live:
    """A request in hand."""

    task: ResponseTask
    num_blocks: int
    ids: list[int]
    """Prompt and response."""
    anchor: int | None = None
    """None while the prompt is computed."""
    digest: int = 0


class EngineGenerator:
    """`drafter_service.training.responses.Generator` over a torch engine.

    Args:
        engine: with a `RawRows` projection where features are wanted.
        stop_ids: end of an answer.
        kept: where rows are kept for features; None keeps none.
    """

    def __init__(
        self,
        engine: TorchEngine,
        *,
        stop_ids: Sequence[int],
        kept: KeptRows | None = None,
    ) -> None:
        self._engine = engine
        self._stop_ids = np.array(stop_ids, np.int32)
        self._kept = kept
        self._live: dict[int, _Live] = {}
        self._next_rid = 1
        self._free_blocks = engine.limits.kv_blocks

    def generate(self, tasks: Iterator[ResponseTask]) -> Iterator[Response]:
        """Answer every task as there is room for it; answers come as they end.

        Raises:
            DSparkError: the engine refuses a task, or its numbers are not finite.
        """
        waiting: list[ResponseTask] = []
        try:
            while True:
                admissions = self._admissions(tasks, waiting)
                if not self._live:
                    return
                outcome = self._engine.step(self._step(admissions))
                for failure in outcome.result.failures:
                    raise error_for(failure.code, failure.message)
                if self._kept is not None:
                    for rows in outcome.committed:
                        self._kept.add(rows)
                yield from self._finished(outcome.result)
        finally:
            self._engine.release_all()
            self._live.clear()
            if self._kept is not None:
                self._kept.clear()
            self._free_blocks = self._engine.limits.kv_blocks

    def _admissions(
        self, tasks: Iterator[ResponseTask], waiting: list[ResponseTask]
    ) -> list[Admission]:
        """Requests to begin with this step: no more prompt tokens than it can compute."""
        admissions: list[Admission] = []
        budget = self._engine.limits.max_step_tokens - len(self._live)
        while len(self._live) < self._engine.limits.max_requests and budget > 0:
            waiting.extend(islice(tasks, 1 - len(waiting)))
            if not waiting:
                break
            num_blocks = self._num_blocks(waiting[0])
            if self._live and num_blocks > self._free_blocks:
                break
            task = waiting.pop()
            budget -= len(task.prompt) + 1
            self._free_blocks -= num_blocks
            self._live[self._next_rid] = _Live(
                task=task, num_blocks=num_blocks, ids=list(task.prompt)
            )
            admissions.append(self._admission(task))
            self._next_rid += 1
        return admissions

    def _num_blocks(self, task: ResponseTask) -> int:
        most_ids = len(task.prompt) + task.max_new_tokens
        return -(-(most_ids - 1) // self._engine.limits.kv_block_tokens)

    def _admission(self, task: ResponseTask) -> Admission:
        return Admission(
            rid=self._next_rid,
            ids=np.array(task.prompt, np.int32),
            num_prompt=len(task.prompt),
            max_new_tokens=task.max_new_tokens,
            stop_ids=self._stop_ids,
            sampling=plain_sampling(task.temperature, mode="rejection", seed=task.seed),
            drafter_id="",
            drafter_address="",
            session_epoch=0,
            want_draft=False,
        )

    def _step(self, admissions: Sequence[Admission]) -> Step:
        rows = [(rid, live) for rid, live in self._live.items() if live.anchor is not None]
        none = np.zeros(len(rows), np.uint8)
        return Step(
            lane_epoch=0,
            step_id=0,
            admissions=tuple(admissions),
            rebinds=(),
            releases=np.zeros(0, np.int64),
            prefill_budget=self._engine.limits.max_step_tokens - len(rows),
            rid=np.array([rid for rid, _ in rows], np.int64),
            anchor=np.array([live.anchor for _, live in rows], np.int32),
            digest=np.array([live.digest for _, live in rows], np.uint64),
            num_draft=none.astype(np.int32),
            want_draft=none,
            draft_ids=np.zeros(0, np.int32),
            has_q=none,
            q_ids=np.zeros((0, 0), np.int32),
            q_probs=np.zeros((0, 0), np.float32),
        )

    def _finished(self, result: StepResult) -> Iterator[Response]:
        first = 0
        for index, rid in enumerate(result.rid.tolist()):
            live = self._live[rid]
            num = int(result.num_emitted[index])
            live.ids += result.token_ids[first : first + num].tolist()
            first += num
            live.anchor, live.digest = int(result.anchor[index]), int(result.digest[index])
            if result.finish[index]:
                del self._live[rid]
                self._free_blocks += live.num_blocks
                num_prompt = len(live.task.prompt)
                features = None
                if self._kept is not None:
                    features = self._kept.take(rid, live.ids, num_prompt)
                yield Response(task=live.task, ids=tuple(live.ids[num_prompt:]), features=features)


def open_generator(
    target: Path, config: GenerationConfig, *, target_layer_ids: Sequence[int] | None = None
) -> EngineGenerator:
    """Load the target.

    Args:
        target_layer_ids: layers to keep beside the last hidden state; None keeps no features.

    Raises:
        ModelNotFound, CheckpointError, Unsupported, ConfigError: see `load_target`.
    """
    if config.num_threads:
        torch.set_num_threads(use_threads(config.num_threads))
    device = resolve_device(config.device)
    model = load_target(target, device=device, dtype=config.dtype)
    limits = engine_limits(
        model,
        target,
        ModelConfig(max_model_len=config.max_model_len),
        VerifierConfig(
            max_requests=config.max_requests,
            max_step_tokens=config.max_step_tokens,
            kv_tokens=config.kv_tokens,
        ),
    )
    rows = None
    if target_layer_ids is not None:
        rows = RawRows(target_layer_ids, model.spec.num_layers)

    def logits(hidden_ND: Tensor) -> Tensor:
        return model.logits(hidden_ND.to(model.device, model.dtype)).float()

    return EngineGenerator(
        TorchEngine(model, limits, rows),
        stop_ids=load_text_model(target).eos_ids,
        kept=None if rows is None else KeptRows(model.spec.hidden_size, logits),
    )
