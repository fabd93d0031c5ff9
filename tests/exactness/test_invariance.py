"""Coupled and greedy texts are functions of seed and context: not of drafter, schedule or batch."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch

from cluster.wire import Sampling
from tests.exactness.tiny import sampling
from verifier_service.acceptance import VerifyRow, accept

VOCAB = 2000
NUM_TOKENS = 12
PROMPT = (7, 1, 3)


@functools.lru_cache(maxsize=10_000)
def target(before: int, last: int) -> torch.Tensor:
    """Logits [V] after two tokens: a fixed pseudo-random function of them, fairly flat."""
    rng = np.random.default_rng([before, last])
    return torch.as_tensor(rng.gumbel(size=VOCAB) * 1.5, dtype=torch.float32)


def decode(
    settings: list[Sampling],
    *,
    goals: list[tuple[int, ...]] | None = None,
    whim: int = 0,
) -> list[tuple[int, ...]]:
    """Decode all in one batch. With goals: drafts of 0 to 5 tokens, a fifth of them wrong."""
    contexts = [PROMPT] * len(settings)
    rng = np.random.default_rng(whim)
    while min(map(len, contexts)) < len(PROMPT) + NUM_TOKENS:
        rows, logits = [], []
        for n, (context, setting) in enumerate(zip(contexts, settings, strict=True)):
            drafts: tuple[int, ...] = ()
            if goals is not None:
                place = len(context) - len(PROMPT)
                right = goals[n][place : place + int(rng.integers(0, 6))]
                drafts = tuple(t if rng.random() < 0.8 else int(rng.integers(VOCAB)) for t in right)
            rows.append(
                VerifyRow(sampling=setting, ids=context, num_prompt=3, draft_ids=drafts, q=None)
            )
            logits.extend(target(*pair) for pair in itertools.pairwise((*context[-2:], *drafts)))
        verdicts = accept(torch.stack(logits), rows)
        contexts = [c + v.token_ids for c, v in zip(contexts, verdicts, strict=True)]
    return [c[len(PROMPT) : len(PROMPT) + NUM_TOKENS] for c in contexts]


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.5, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
        {"temperature": 0.9, "top_p": 0.9, "min_p": 0.001},
    ],
)
def test_same_text_whatever_happens(changes: dict[str, float]) -> None:
    settings = [sampling(seed=n + 1, **changes) for n in range(32)]
    plain = decode(settings)
    if changes["temperature"] > 0:
        assert len(set(plain)) == 32, "seeds make no difference"
    for whim in (1, 2):
        assert decode(settings, goals=plain, whim=whim) == plain
    for n in (0, 31):
        assert decode([settings[n]], goals=[plain[n]], whim=3) == [plain[n]]
