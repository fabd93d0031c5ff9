"""Greedy, coupled and rejection requests in the same steps, with q and without, end to end."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np

from cluster import digest
from cluster.wire import Sampling, Step
from router.node import RouterNode
from tests.fakes import VOCAB_SIZE, FakeDrafter, FakeEngine, target_logits
from tests.frames import make_blocks, make_sampling
from tests.router.harness import DRAFTER, Answer, ask, cluster, expected_ids, make_request
from verifier_service.engine import StepOutcome

PROMPT = (11, 3)
NUM_TOKENS = 8
TOP_K = 3
Law = dict[int, float]


class SamplingDrafter(FakeDrafter):
    """For rejection requests: draws from a sparse q of its own, of another width and support for
    each block, and ships it; every fourth block is one-hot instead. Greedy text for the others."""

    def __init__(self) -> None:
        super().__init__(drafter=DRAFTER, gamma=3, num_right=2)
        self.rng = np.random.default_rng(5)
        self.sent: dict[tuple[int, int], list[tuple[int, Law]]] = {}
        """By request and anchor: drafts and the laws that they were drawn from."""

    async def _draft(self, lane_id: str, rid: int, session: Any) -> None:
        if session.sampling.mode != "rejection" or self.rng.random() < 0.25:
            await super()._draft(lane_id, rid, session)
            return
        width = int(self.rng.integers(1, 7))
        state, drafts, q_ids, q_probs = digest.of(session.ids), [], [], []
        for _ in range(self._gamma):
            likely = target_logits(state).topk(TOP_K).indices.numpy()
            others = np.setdiff1d(np.arange(VOCAB_SIZE), likely)
            pool = np.concatenate([likely, self.rng.choice(others, 4, replace=False)])
            ids = self.rng.permutation(pool[:width] if self.rng.random() < 0.7 else pool)[:width]
            probs = self.rng.dirichlet(np.ones(width)).astype(np.float32)
            drafts.append(int(self.rng.choice(ids, p=probs / probs.sum(dtype=np.float64))))
            q_ids.append(ids)
            q_probs.append(probs)
            state = digest.extend(state, drafts[-1:])
        laws = [law_of(*row) for row in zip(q_ids, q_probs, strict=True)]
        self.sent[rid, len(session.ids) - 1] = list(zip(drafts, laws, strict=True))
        block = dataclasses.replace(
            make_blocks(rid, session.epoch, session.ids, drafts, drafter_id=self.member_id),
            confidence=self.rng.uniform(0.3, 1.0, (1, self._gamma)).astype(np.float32),
            has_q=np.ones(1, np.uint8),
            q_ids=np.array([q_ids], np.int32),
            q_probs=np.array([q_probs], np.float32),
        )
        await self._routers[lane_id].send(block)


class RecordingEngine(FakeEngine):
    """Notes the drafts of every verify row with the law that came with each."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rows: list[tuple[tuple[int, int], list[tuple[int, Law]]]] = []
        self.num_mixed = 0

    def step(self, step: Step) -> StepOutcome:
        has_q = set(step.has_q[step.num_draft > 0].tolist())
        self.num_mixed += has_q == {0, 1}
        drafts, qs = iter(step.draft_ids.tolist()), zip(step.q_ids, step.q_probs, strict=True)
        for i, rid in enumerate(step.rid.tolist()):
            row = [
                (next(drafts), law_of(*next(qs)) if step.has_q[i] else {})
                for _ in range(step.num_draft[i])
            ]
            self.rows.append(((rid, int(step.anchor[i])), row))
        return super().step(step)


def law_of(ids: Any, probs: Any) -> Law:
    """One row of a sparse q; absent means zero."""
    return {int(i): float(p) for i, p in zip(ids, probs, strict=True) if p > 0}


def likeliest(ids: tuple[int, ...]) -> list[int]:
    """The tokens that the target allows behind these ids."""
    return target_logits(digest.of(ids)).topk(TOP_K).indices.tolist()


async def many(
    router: RouterNode, name: str, samplings: list[Sampling], **changes: Any
) -> list[Answer]:
    """The same prompt under each sampling, sixteen at a time."""
    room = asyncio.Semaphore(16)

    async def one(i: int, sampling: Sampling) -> Answer:
        async with room:
            values = {"sampling": sampling, "ignore_eos": True, "request_id": f"{name}{i}"}
            return await ask(router, make_request(PROMPT, NUM_TOKENS, **(values | changes)))

    return await asyncio.gather(*(one(i, s) for i, s in enumerate(samplings)))


async def test_every_mode_keeps_its_promise_in_a_mixed_batch() -> None:
    stochastic = {"temperature": 1.0, "top_k": TOP_K, "logprobs": True}
    coupled = [make_sampling(seed=i, **stochastic) for i in range(60)]
    rejection = [make_sampling(mode="rejection", seed=i, **stochastic) for i in range(150)]
    engine = RecordingEngine(max_requests=24)
    async with cluster(scheduling={"gate_drafts": False}) as c:
        await c.add_verifier(engine=engine)
        drafter = SamplingDrafter()
        await c.add_drafter(drafter)
        router = await c.add_router()
        await c.ready(router, drafters=1)
        plain = await many(router, "p", coupled, draft=False)
        greedy, drafted, drawn = await asyncio.gather(
            many(router, "g", [make_sampling()] * 60),
            many(router, "c", coupled),
            many(router, "r", rejection),
        )
        figures = router.metrics()
        assert figures["num_retries"] == figures["num_malformed"] == 0
        assert not drafter.faults
    assert all(answer.ids == expected_ids(PROMPT, NUM_TOKENS) for answer in greedy)
    assert [answer.ids for answer in drafted] == [answer.ids for answer in plain]
    accepted = sum(answer.usage.num_accepted for answer in drawn)
    assert 0 < accepted < sum(answer.usage.num_verified for answer in drawn)
    with_q = [(key, row) for key, row in engine.rows if row and row[0][1]]
    assert len(with_q) > 50
    assert all(row == drafter.sent[key][: len(row)] for key, row in with_q)
    assert {len(row) for _, row in with_q} >= {1, 2}, "blocks cut to several lengths"
    assert engine.num_mixed > 5
    for answer in drawn:
        assert_logprobs(answer)
    for answer in drawn:
        for place, token in enumerate(answer.ids):
            assert token in likeliest((*PROMPT, *answer.ids[:place]))


def assert_logprobs(answer: Answer) -> None:
    """One per token, each of that token behind its own prefix, whatever was drafted."""
    ids = list(PROMPT)
    found = [x for delta in answer.deltas for x in delta.logprobs]
    for token, logprob in zip(answer.ids, found, strict=True):
        expected = target_logits(digest.of(ids)).log_softmax(0)[token]
        assert abs(logprob - float(expected)) < 1e-4
        ids.append(token)
