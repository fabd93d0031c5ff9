"""Every engine says what the torch engine says: a text is a function of model, prompt and seed.

The torch engine's twin here has other blocks, no drafts and one request at a time; for the torch
engine itself that alone is the difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.wire import Sampling
from tests.frames import make_admission, make_sampling
from tests.verifier_service.conformance.drafts import leaning
from tests.verifier_service.conformance.engines import open_engine
from tests.verifier_service.conformance.oracle import near_ties
from tests.verifier_service.conformance.rounds import Drafter, Rounds, undrafted
from tests.verifier_service.conformance.targets import Target, chat_prompts
from tests.verifier_service.torch_targets import prompt
from verifier_service.engine import Engine

NUM_NEW = 16


def say(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    drafter: Drafter = undrafted,
    concurrency: int = 16,
) -> dict[int, list[int]]:
    """Prompts and texts."""
    rounds = Rounds(engine, concurrency=concurrency)
    rounds.run(
        [
            make_admission(rid, ids, max_new_tokens=NUM_NEW, sampling=samplings[rid])
            for rid, ids in enumerate(prompts)
        ],
        drafter,
    )
    return rounds.ids


def check_equal(
    engine: Engine, target: Target, prompts: Sequence[list[int]], most_ties: int
) -> None:
    """At temperature 1 and 0.7, drafted on one side only: equal up to near-ties, which are few."""
    samplings = [
        make_sampling(temperature=(1.0, 0.7)[rid % 2], seed=1000 + rid)
        for rid in range(len(prompts))
    ]
    twin = open_engine("torch", target.folder, max_model_len=512, kv_block_tokens=8)
    wanted = say(twin, prompts, samplings, concurrency=1)
    plain = say(engine, prompts, samplings)
    drafted = say(engine, prompts, samplings, leaning(wanted))
    ties = 0
    for rid, ids in enumerate(prompts):
        texts = {tuple(text[rid]) for text in (wanted, plain, drafted)}
        if len(texts) > 1:
            apart = sum(near_ties(target, text, len(ids), samplings[rid]) for text in texts)
            assert apart > 0, f"texts of request {rid} differ without a near-tie"
            ties += apart
    assert ties <= most_ties, "near-ties are rare: this many means that something is off"


def test_tiny(engine: Engine, tiny: Target) -> None:
    check_equal(engine, tiny, [prompt(5 + seed, seed) for seed in range(24)], most_ties=1)


@pytest.mark.slow
@pytest.mark.model
def test_embedded(smollm2: Engine, embedded: Target) -> None:
    check_equal(smollm2, embedded, chat_prompts(embedded.reference, 24), most_ties=3)
