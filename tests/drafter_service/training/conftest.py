"""A tiny random target with replies of its own, small enough to train a drafter on in seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafter_service.training.config import DrafterShape, Schedule, TrainConfig

VOCAB = 64


def write_target(folder: Path, *, seed: int, vocab_size: int = VOCAB) -> LlamaForCausalLM:
    """A four-layer Llama whose large weights make its replies repetitive, so easy to draft."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            initializer_range=0.3,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=2,
        )
    ).eval()
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def reply(model: LlamaForCausalLM, prompt: list[int], *, greedy: bool, length: int) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(length):
        logits = model(ids).logits[0, -1]
        token = logits.argmax() if greedy else torch.multinomial(logits.softmax(-1), 1)[0]
        ids = torch.cat([ids, token.view(1, 1)], dim=1)
    return ids[0, len(prompt) :].tolist()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``target/`` and ``data.jsonl``: 20 prompts, half of the replies greedy."""
    folder = tmp_path_factory.mktemp("tiny")
    model = write_target(folder / "target", seed=3)
    rows = []
    for number in range(20):
        prompt = torch.randint(3, VOCAB, (4 + number % 3,)).tolist()
        response = reply(model, prompt, greedy=number % 2 == 0, length=20 + number % 4)
        rows.append({"prompt": prompt, "response": response, "t": float(number % 2)})
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def make_config(tiny: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """A small run on the tiny target; keyword arguments override."""

    def make(**overrides: Any) -> TrainConfig:
        values: dict[str, Any] = {
            "target": tiny / "target",
            "data": tiny / "data.jsonl",
            "work": tmp_path / "work",
            "output": tmp_path / "drafter",
            "num_held_out": 4,
            "shape": DrafterShape(gamma=3, markov_rank=8, draft_vocab_size=40),
            "schedule": Schedule(
                num_steps=8,
                sequences_per_step=3,
                anchors_per_sequence=5,
                learning_rate=3e-3,
                evaluate_every=4,
                checkpoint_every=2,
            ),
        }
        return TrainConfig(**{**values, **overrides})

    return make
