"""Rounds out of thin air, of drafters whose acceptance and honesty are chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from deploy.offline.evaluation import Measured, Regime
from deploy.offline.prompts import Prompt
from deploy.offline.records import Round
from deploy.offline.round_table import RoundTable, round_table

GAMMA = 4
MAX_NEW = 100
PROMPT = Prompt(ids=tuple(range(10)), source="gsm8k", domain="math")
OTHER = Prompt(ids=tuple(range(10)), source="chat-set", domain="chat")


def make_round(**changes: Any) -> Round:
    """Two of four drafts accepted, far from the end of the request."""
    one = Round(
        prompt=0,
        source="gsm8k",
        domain="math",
        regime="greedy",
        anchor=20,
        draft_ids=(1, 2, 3, 4),
        confidence=(0.9, 0.8, 0.5, 0.5),
        num_verified=4,
        num_accepted=2,
        reached=3,
        num_emitted=3,
        draft_batch=1,
    )
    return dataclasses.replace(one, **changes)


def make_table(
    rounds: Sequence[Round], prompts: Sequence[Prompt] = (PROMPT, OTHER), **changes: Any
) -> RoundTable:
    settings: dict[str, Any] = {"max_new_tokens": MAX_NEW, "gamma": GAMMA, "stop_ids": (7,)}
    return round_table(rounds, prompts, **{**settings, **changes})


def random_rounds(
    num_prompts: int = 40, per_prompt: int = 25, *, bias: float = 0.0, seed: int = 0
) -> tuple[list[Round], list[Prompt]]:
    """Rounds whose drafts survive with the stated confidence (less ``bias``), half math, half
    chat; chat is drafted worse."""
    random = np.random.default_rng(seed)
    prompts = [PROMPT if i % 2 else OTHER for i in range(num_prompts)]
    rounds = []
    for index, prompt in enumerate(prompts):
        for number in range(per_prompt):
            confidence = random.uniform(0.3 if prompt is OTHER else 0.5, 1.0, GAMMA)
            won = random.uniform(size=GAMMA) < confidence - bias
            accepted = int(np.logical_and.accumulate(won).sum())
            rounds.append(
                make_round(
                    prompt=index,
                    source=prompt.source,
                    domain=prompt.domain,
                    anchor=10 + 3 * number,
                    confidence=tuple(confidence.tolist()),
                    num_accepted=accepted,
                    num_emitted=accepted + 1,
                    reached=min(accepted + 1, GAMMA),
                )
            )
    return rounds, prompts


def make_measured(drafter: str = "ours", temperature: float = 0.0, **changes: Any) -> Measured:
    """A run of `random_rounds`; ``bias`` and ``seed`` go there, the rest replaces fields."""
    settings = {key: changes.pop(key) for key in ("bias", "seed") if key in changes}
    rounds, prompts = random_rounds(**settings)
    measured = Measured(
        drafter=drafter,
        regime=Regime(temperature=temperature, mode="coupled"),
        draft_batch=None,
        table=make_table(rounds, prompts),
        num_lost=0,
    )
    return dataclasses.replace(measured, **changes)
