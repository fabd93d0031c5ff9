"""Tiny random targets as Hugging Face folders, and a lane that drives an engine over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from cluster.config import ModelConfig, VerifierConfig
from cluster.wire import Admission, StepResult
from tests.frames import Row, make_admission, make_step
from verifier_service.engine import StepOutcome
from verifier_service.torch_engine import TorchEngine, load_engine

VOCAB_SIZE = 211

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}


def save_llama(folder: Path, *, seed: int = 0, shard: str = "1GB", **changes: Any) -> Any:
    """Write a random Llama (GQA 3, tied head) and return it as transformers has it."""
    config = LlamaConfig(**{**_SHAPE, "tie_word_embeddings": True, **changes})
    return _save(LlamaForCausalLM, config, folder, seed, shard)


def save_qwen3(folder: Path, *, seed: int = 0, **changes: Any) -> Any:
    """Write a random Qwen3 (query and key norms, head_dim unlike hidden / heads)."""
    config = Qwen3Config(**{**_SHAPE, "head_dim": 16, **changes})
    return _save(Qwen3ForCausalLM, config, folder, seed, "1GB")


def _save(cls: Any, config: Any, folder: Path, seed: int, shard: str) -> Any:
    torch.manual_seed(seed)
    model = cls(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # initialised to ones: a swapped or missing norm would not show
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.3)
            else:
                parameter.mul_(8.0)  # logits far enough apart that greedy has no ties
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def make_engine(folder: Path, *, drafter: Path | None = None, **changes: Any) -> TorchEngine:
    """A small engine; ``changes`` go to the section of the config that has the key."""
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    model = {key: value for key, value in changes.items() if key in fields}
    verifier = {key: value for key, value in changes.items() if key not in fields}
    settings = {"kv_tokens": 4096, "kv_block_tokens": 16, "max_step_tokens": 128, **verifier}
    return load_engine(
        folder,
        model=ModelConfig(**{"target": str(folder), **model}),
        verifier=VerifierConfig(**settings),
        drafter=drafter,
    )


def prompt(length: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Random ids."""
    return np.random.default_rng(seed).integers(0, vocab_size, length).tolist()


@torch.no_grad()
def reference_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Logits [len(ids), V] by transformers, without a cache."""
    return model(torch.tensor([list(ids)])).logits[0]


def reference_greedy(model: Any, ids: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy continuation by transformers, without a cache."""
    ids = list(ids)
    for _ in range(num_tokens):
        ids.append(int(reference_logits(model, ids)[-1].argmax()))
    return ids[-num_tokens:]


def load_reference(folder: Path) -> Any:
    """The model of a folder, as transformers has it, in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


Drafter = Callable[[int, Sequence[int]], Sequence[int]]
"""(rid, committed ids) -> draft ids."""


class Lane:
    """The lane's side of the rounds: knows every request's ids, sends rows, applies results."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.ids: dict[int, list[int]] = {}
        self.decoding: set[int] = set()
        self.finish: dict[int, int] = {}
        self.accepted: dict[int, int] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.failures: dict[int, str] = {}
        self.outcomes: list[StepOutcome] = []

    def step(
        self,
        admissions: Sequence[Admission] = (),
        *,
        drafter: Drafter = lambda rid, ids: (),
        rids: Sequence[int] | None = None,
        **changes: Any,
    ) -> StepResult:
        """One round: ``rids`` (default all that decode) are verified with their drafts."""
        for admission in admissions:
            self.ids[admission.rid] = admission.ids.tolist()
        chosen = sorted(self.decoding) if rids is None else rids
        rows = [
            Row(rid=rid, ids=self.ids[rid], draft_ids=list(drafter(rid, self.ids[rid])))
            for rid in chosen
        ]
        step = make_step(rows, admissions=tuple(admissions), **changes)
        outcome = self.engine.step(step)
        self.outcomes.append(outcome)
        self._apply(outcome.result)
        return outcome.result

    def run(self, admissions: Sequence[Admission], drafter: Drafter = lambda rid, ids: ()) -> None:
        """Rounds until every request of this lane has ended."""
        self.step(admissions, drafter=drafter)
        for _ in range(2000):
            if len(self.finish) + len(self.failures) == len(self.ids):
                return
            self.step(drafter=drafter)
        raise AssertionError("requests do not end")

    def emitted(self, rid: int, num_prompt: int) -> list[int]:
        """What a request has been given."""
        return self.ids[rid][num_prompt:]

    def _apply(self, result: StepResult) -> None:
        tokens, logprobs = result.token_ids.tolist(), result.logprobs.tolist()
        for index, rid in enumerate(result.rid.tolist()):
            num = int(result.num_emitted[index])
            self.ids[rid] += tokens[:num]
            self.logprobs.setdefault(rid, []).extend(logprobs[:num])
            tokens, logprobs = tokens[num:], logprobs[num:]
            self.accepted[rid] = self.accepted.get(rid, 0) + int(result.num_accepted[index])
            self.decoding.add(rid)
            assert int(result.anchor[index]) == len(self.ids[rid]) - 1
            if result.finish[index]:
                self.finish[rid] = int(result.finish[index])
                self.decoding.discard(rid)
        for failure in result.failures:
            self.failures[failure.rid] = failure.code
        assert not tokens


def admission(rid: int, ids: Sequence[int], max_new_tokens: int = 8, **changes: Any) -> Admission:
    """A greedy request."""
    return make_admission(rid, ids, max_new_tokens=max_new_tokens, **changes)
