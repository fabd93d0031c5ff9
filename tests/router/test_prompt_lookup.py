"""Prompt lookup served end to end: a verifier without projection, commits without features."""

from __future__ import annotations

import asyncio

import torch

from cluster.config import LookupConfig
from cluster.fingerprint import drafter_fingerprint
from drafter_service.node import DrafterNode
from drafter_service.prompt_lookup import PromptLookup
from router.request import GenerateRequest
from tests.fakes import VOCAB_SIZE, FakeEngine, target_logits
from tests.frames import make_sampling
from tests.router.harness import MAX_MODEL_LEN, PROFILE, Cluster, ask, cluster, make_request
from verifier_service.acceptance import VerifyRow
from verifier_service.node import VerifierNode

LOOKUP = LookupConfig(gamma=5, max_ngram=4, min_ngram=2)
FINGERPRINT = drafter_fingerprint("ngram", LOOKUP)


class MarkovEngine(FakeEngine):
    """Its law depends on the last id only, so greedy text soon runs in a circle."""

    def _laws(self, row: VerifyRow) -> list[torch.Tensor]:
        return [target_logits(last) for last in (row.ids[-1], *row.draft_ids)]


def markov_continuation(prompt: tuple[int, ...], num: int) -> list[int]:
    ids = [prompt[-1]]
    for _ in range(num):
        ids.append(int(target_logits(ids[-1]).argmax()))
    return ids[1:]


async def start(c: Cluster, engine: FakeEngine) -> tuple[PromptLookup, DrafterNode]:
    """A verifier without features and a lookup drafter, both real nodes."""
    verifier = VerifierNode(
        member_id="verifier-0",
        engine=engine,
        config=c.config,
        directory=c.directory,
        drafter=FINGERPRINT,
        profile=PROFILE,
    )
    await verifier.start()
    c.verifiers["verifier-0"], c.engines["verifier-0"] = verifier, engine
    lookup = PromptLookup(
        LOOKUP,
        vocab_size=VOCAB_SIZE,
        max_positions=MAX_MODEL_LEN,
        max_sessions=64,
        max_session_tokens=1 << 14,
        idle_session_s=60.0,
    )
    node = DrafterNode(
        member_id="drafter-0",
        engine=lookup,
        config=c.config,
        directory=c.directory,
        model="fake-target",
        drafter=FINGERPRINT,
    )
    await node.start()
    return lookup, node


async def test_text_is_that_of_plain_decoding_and_repetitions_are_accepted() -> None:
    async with cluster() as c:
        engine = MarkovEngine(max_model_len=MAX_MODEL_LEN, has_projection=False)
        lookup, node = await start(c, engine)
        router = await c.add_router()
        await c.ready(router, drafters=1)
        prompts = [(i, 5, 9 + i) for i in range(1, 7)]
        requests = [make_request(prompt, 80, ignore_eos=True) for prompt in prompts]
        answers = await asyncio.gather(*(ask(router, request) for request in requests))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.ids == markov_continuation(prompt, 80)
        figures = router.metrics()
        assert figures["num_accepted"] > 0.5 * 80 * len(prompts)
        assert engine.num_steps < 80
        assert figures["num_malformed"] == figures["num_rebinds"] == 0
        # Late blocks are a matter of load; blocks of another text would be a fault.
        assert not {"stale.digest", "stale.epoch", "stale.drafter"} & figures.keys()
        await c.settle()
        await node.stop(grace_s=5.0)
    assert lookup.num_sessions == 0
    assert lookup.sessions.allocator.num_free == (1 << 14) // 32
    counters = lookup.counters
    assert counters.gaps == counters.diverged == counters.unknown == counters.stale == 0


async def test_sampled_text_does_not_depend_on_drafts() -> None:
    """Coupled mode: with and without the drafter, the same seed gives the same text."""

    def request(seed: int) -> GenerateRequest:
        return make_request(
            (3, 5, seed),
            60,
            request_id=f"seed-{seed}",
            sampling=make_sampling(temperature=0.3, seed=seed),
            ignore_eos=True,
        )

    texts: list[list[list[int]]] = []
    for drafted in (True, False):
        async with cluster() as c:
            engine = MarkovEngine(max_model_len=MAX_MODEL_LEN, has_projection=False)
            _, node = await start(c, engine)
            if not drafted:
                await node.stop()
            router = await c.add_router()
            await c.ready(router, drafters=int(drafted))
            answers = await asyncio.gather(*(ask(router, request(s)) for s in range(1, 5)))
            texts.append([answer.ids for answer in answers])
            assert (router.metrics()["num_accepted"] > 0) == drafted
            await c.settle()
            await node.stop(grace_s=5.0)
    assert texts[0] == texts[1]


async def test_rejection_mode_takes_one_hot_drafts() -> None:
    """Drafts without q are accepted in rejection mode too, and nothing is refused."""
    async with cluster() as c:
        engine = MarkovEngine(max_model_len=MAX_MODEL_LEN, has_projection=False)
        _, node = await start(c, engine)
        router = await c.add_router()
        await c.ready(router, drafters=1)
        sampling = make_sampling(temperature=0.2, seed=11, mode="rejection")
        answer = await ask(router, make_request((3, 5, 8), 80, sampling=sampling, ignore_eos=True))
        assert len(answer.ids) == 80
        figures = router.metrics()
        assert figures["num_accepted"] > 0
        assert figures["num_malformed"] == 0
        await c.settle()
        await node.stop(grace_s=5.0)
