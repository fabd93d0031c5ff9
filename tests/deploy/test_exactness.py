"""Lossless, through the running system: every served token is the one the plain target gives.

Each token is checked against transformers' own model given the emitted prefix
(`tests.deploy.reference`), whatever drafted it and however many requests shared its step.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dspark import AsyncClient
from tests.deploy.conftest import Served
from tests.deploy.prompts import PROMPTS, some
from tests.deploy.random_drafter import write_random_drafter
from tests.deploy.reference import ReferenceTarget

pytestmark = [
    pytest.mark.ray,
    pytest.mark.model,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

MAX_TIE_RATE = 0.01
"""Near-ties admitted per token: they are an excuse for the last bits, not a way out."""
SEED = 20


@pytest.fixture(scope="module")
def reference(smollm2_dir: Path) -> ReferenceTarget:
    return ReferenceTarget(smollm2_dir)


@pytest.fixture(scope="module")
def garbage(served: Served, smollm2_dir: Path, tmp_path_factory: Any) -> Iterator[Served]:
    """A second application on the same Ray, whose drafter has random weights. Its router goes on
    asking it, as that of the first one does: left to itself it would soon have noticed."""
    from deploy.service import start_application, stop_application, wait_ready

    drafter = write_random_drafter(tmp_path_factory.mktemp("garbage") / "d", smollm2_dir)
    config = replace(
        served.config,
        drafter=replace(served.config.drafter, checkpoint=str(drafter)),
        cluster=replace(served.config.cluster, application="garbage"),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start_application(config)
        wait_ready(served.address, config, 120.0)
        yield Served(address=served.address, config=config)
        stop_application(config.cluster.application)


def enough(prompts: Sequence[str], concurrency: int) -> list[str]:
    """All prompts, some of them again if it takes more to run so many at a time."""
    number = max(concurrency, len(prompts))
    return list(itertools.islice(itertools.cycle(prompts), number))


async def outputs(
    client: AsyncClient, prompts: Sequence[list[int]], concurrency: int, **options: Any
) -> list[Any]:
    """Generations of all prompts, at most ``concurrency`` of them at a time."""
    gate = asyncio.Semaphore(concurrency)

    async def one(ids: list[int]) -> Any:
        async with gate:
            generation = client.generate(token_ids=ids, **options)
            await generation.text()
            return generation

    return await asyncio.gather(*(one(ids) for ids in prompts))


def proposed(generations: Sequence[Any]) -> int:
    return sum(generation.usage.proposed for generation in generations)


async def check_greedy(
    served: Served, reference: ReferenceTarget, how: str, prompts: Sequence[str], concurrency: int
) -> None:
    ids = [reference.chat(prompt) for prompt in enough(prompts, concurrency)]
    async with served.async_client() as client:
        generations = await outputs(client, ids, concurrency, max_tokens=32, draft=how != "plain")
    assert (proposed(generations) > 0) == (how != "plain")
    ties = tokens = 0
    for prompt, generation in zip(ids, generations, strict=True):
        assert len(generation.token_ids) == 32 or generation.finish_reason == "stop"
        ties += reference.greedy_ties(prompt, generation.token_ids)
        tokens += len(generation.token_ids)
    print(f"{how}, concurrency {concurrency}: {ties} near-ties in {tokens} tokens")
    assert ties <= MAX_TIE_RATE * tokens


@pytest.mark.parametrize("concurrency", [1, 16])
@pytest.mark.parametrize("how", ["drafted", "plain", "garbage"])
async def test_greedy_tokens_are_the_targets(
    served: Served, reference: ReferenceTarget, how: str, concurrency: int, request: Any
) -> None:
    system = request.getfixturevalue("garbage") if how == "garbage" else served
    await check_greedy(system, reference, how, some(8), concurrency)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("concurrency", [1, 16])
@pytest.mark.parametrize("how", ["drafted", "plain", "garbage"])
async def test_greedy_tokens_of_sixty_prompts_are_the_targets(
    served: Served, reference: ReferenceTarget, how: str, concurrency: int, request: Any
) -> None:
    system = request.getfixturevalue("garbage") if how == "garbage" else served
    await check_greedy(system, reference, how, PROMPTS, concurrency)


async def test_random_drafts_are_refused_not_trusted(
    garbage: Served, reference: ReferenceTarget
) -> None:
    """The garbage of the tests above really is: drafted, verified where it claims to be good, and
    hardly ever accepted."""
    async with garbage.async_client() as client:
        generations = await outputs(
            client, [reference.chat(prompt) for prompt in some(8)], 8, max_tokens=24
        )
    verified = sum(generation.usage.verified for generation in generations)
    accepted = sum(generation.usage.accepted for generation in generations)
    assert proposed(generations) > 100
    assert accepted <= 0.1 * max(verified, 1)


async def test_texts_are_the_same_while_the_router_decides_where_to_draft(
    served: Served, reference: ReferenceTarget
) -> None:
    """Gated, with all defaults: drafted rounds and plain ones in whatever order pays."""
    async with served.async_client() as client:
        await client.set_scheduling({"gate_drafts": True})
        try:
            ids = [reference.chat(prompt) for prompt in some(8)]
            generations = await outputs(client, ids, 8, max_tokens=32)
        finally:
            await client.set_scheduling({"gate_drafts": False})
    tokens = sum(len(generation.token_ids) for generation in generations)
    ties = sum(
        reference.greedy_ties(prompt, generation.token_ids)
        for prompt, generation in zip(ids, generations, strict=True)
    )
    assert ties <= MAX_TIE_RATE * tokens


async def sampled(
    served: Served, prompts: Sequence[list[int]], concurrency: int, **options: Any
) -> Any:
    async with served.async_client() as client:
        return await outputs(
            client, prompts, concurrency, max_tokens=32, temperature=1.0, seed=SEED, **options
        )


def check_coupled(
    reference: ReferenceTarget, prompts: Sequence[list[int]], generations: Sequence[Any]
) -> None:
    ties = sum(
        reference.coupled_ties(prompt, generation.token_ids, SEED)
        for prompt, generation in zip(prompts, generations, strict=True)
    )
    tokens = sum(len(generation.token_ids) for generation in generations)
    assert ties <= MAX_TIE_RATE * tokens


@pytest.mark.parametrize("concurrency", [1, 16])
@pytest.mark.parametrize("draft", [True, False])
async def test_coupled_tokens_are_those_of_seed_and_prefix(
    served: Served, reference: ReferenceTarget, draft: bool, concurrency: int
) -> None:
    prompts = [reference.chat(prompt) for prompt in enough(some(8), concurrency)]
    generations = await sampled(served, prompts, concurrency, draft=draft)
    check_coupled(reference, prompts, generations)


async def test_coupled_tokens_do_not_know_that_the_drafter_died(
    served: Served, reference: ReferenceTarget
) -> None:
    prompts = [reference.chat(prompt) for prompt in enough(some(8), 16)]

    async def kill_the_drafter() -> int:
        (victim,) = served.replica_pids("Drafter")
        await asyncio.sleep(0.8)
        os.kill(victim, signal.SIGKILL)
        return victim

    generations, victim = await asyncio.gather(sampled(served, prompts, 16), kill_the_drafter())
    assert proposed(generations) > 0
    check_coupled(reference, prompts, generations)
    await drafter_is_back(served, victim)


async def drafter_is_back(served: Served, victim: int) -> None:
    """Leave the pool as it was: within 90 s there is another replica, and the router uses it."""
    async with served.async_client() as client:
        for _ in range(180):
            model = await client.get_model()
            if model.drafters and victim not in served.replica_pids("Drafter"):
                return
            await asyncio.sleep(0.5)
    pytest.fail("no drafter came back")


def test_the_reference_catches_a_wrong_token(reference: ReferenceTarget) -> None:
    prompt = reference.chat(some(1)[0])
    good: list[int] = []
    for _ in range(4):
        good.append(int(reference.logits(tuple(prompt), (*good, 0))[-1].argmax()))
    assert reference.greedy_ties(prompt, good) == 0
    wrong = [*good[:2], (good[2] + 1) % 49152, good[3]]
    with pytest.raises(AssertionError, match="token 2"):
        reference.greedy_ties(prompt, wrong)
    with pytest.raises(AssertionError):
        reference.coupled_ties(prompt, wrong, SEED)
