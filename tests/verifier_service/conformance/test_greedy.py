"""Greedy text is transformers', whatever is drafted and however many requests run beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import pytest

from tests.frames import make_admission
from tests.verifier_service.conformance.drafts import KINDS, MixedDrafts
from tests.verifier_service.conformance.rounds import Rounds
from tests.verifier_service.conformance.targets import Target, chat_prompts
from tests.verifier_service.torch_targets import prompt
from verifier_service.engine import Engine

NUM_NEW: Final = 24


def check_drafted(
    engine: Engine, target: Target, texts: Mapping[int, Sequence[int]], concurrency: int
) -> None:
    """Decode with all kinds of drafts: the same text, near-ties aside.

    Args:
        texts: by request, a prompt and its `NUM_NEW` greedy tokens by transformers.
    """
    drafts = MixedDrafts(
        texts, vocab_size=target.vocab_size, max_model_len=engine.limits.max_model_len
    )
    starts = {rid: list(text[:-NUM_NEW]) for rid, text in texts.items()}
    rounds = Rounds(engine, concurrency=concurrency)
    rounds.run(
        [make_admission(rid, ids, max_new_tokens=NUM_NEW) for rid, ids in starts.items()], drafts
    )
    different = [rid for rid, text in texts.items() if rounds.ids[rid] != list(text)]
    ties = 0
    for rid in different:  # each text leaves the other at a near-tie, or one of them is wrong
        start, text = starts[rid], texts[rid]
        num_ties = target.reference.greedy_ties(start, rounds.emitted(rid))
        num_ties += target.reference.greedy_ties(start, text[len(start) :])
        assert num_ties > 0, f"request {rid} leaves transformers' text without a near-tie"
        ties += num_ties
    assert all(len(rounds.emitted(rid)) == NUM_NEW for rid in texts)
    assert ties <= 3, "near-ties are rare: this many means that something is off"
    assert min(drafts.num[kind] for kind in KINDS) >= len(texts) / 3
    assert rounds.num_stale >= drafts.num["stale"] + drafts.num["late"] - len(texts)
    assert rounds.num_preempted == 0
    # True and long blocks are taken whole, corrupted ones up to the wrong token.
    assert sum(rounds.num_accepted.values()) >= NUM_NEW / 2 * len(texts)


def texts_of(target: Target, prompts: Sequence[list[int]]) -> dict[int, list[int]]:
    """Each prompt and its greedy continuation by transformers."""
    return {rid: [*ids, *target.greedy(ids, NUM_NEW)] for rid, ids in enumerate(prompts)}


@pytest.fixture(scope="package")
def sixty_texts(embedded: Target) -> dict[int, list[int]]:
    return texts_of(embedded, chat_prompts(embedded.reference, 60))


@pytest.mark.parametrize("concurrency", [1, 8])
def test_tiny(engine: Engine, tiny: Target, concurrency: int) -> None:
    prompts = [
        prompt(length, 100 * concurrency + length) for length in (1, 3, 17, 40, 5, 33, 2, 16, 9)
    ]
    check_drafted(engine, tiny, texts_of(tiny, prompts), concurrency)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("concurrency", [1, 16])
def test_sixty_prompts(
    smollm2: Engine, embedded: Target, sixty_texts: dict[int, list[int]], concurrency: int
) -> None:
    check_drafted(smollm2, embedded, sixty_texts, concurrency)
