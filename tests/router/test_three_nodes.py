"""Router, verifier and drafter replicas together, all three real; only what computes is a fake."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from cluster.wire import Commit, Open, Release
from drafter_service.drafter import Drafted, DrafterLimits, DraftOutcome, Work
from drafter_service.node import DrafterNode
from drafter_service.sampling import Block
from drafter_service.sessions import DraftSession, Key, SessionCounters, SessionTable
from tests.fakes import VOCAB_SIZE, greedy_continuation
from tests.router.harness import DRAFTER, Cluster, ask, cluster, expected_ids, make_request
from tests.router.test_kill import Bomb, keep_asking, sever

GAMMA = 4


class LawDrafter:
    """A `Drafter` with real session bookkeeping that drafts the made-up law's greedy text."""

    def __init__(self, *, max_sessions: int = 64) -> None:
        self.limits = DrafterLimits(gamma=GAMMA, vocab_size=VOCAB_SIZE, feature_size=2)
        self.table = SessionTable(
            max_sessions=max_sessions, max_tokens=1 << 14, max_positions=4096, idle_s=60.0
        )
        self._ids: dict[Key, list[int]] = {}

    @property
    def num_sessions(self) -> int:
        return len(self.table)

    @property
    def counters(self) -> SessionCounters:
        return self.table.counters

    def run(self, work: Sequence[Work], now_s: float) -> DraftOutcome:
        wanted: dict[Key, DraftSession] = {}
        for item in work:
            frame = item.frame
            if isinstance(frame, Open):
                if self.table.open(frame, item.owner, now_s) is not None:
                    self._ids[frame.lane_id, frame.rid] = [frame.first_id]
            elif isinstance(frame, Commit):
                self._commit(frame, item.owner, now_s, wanted)
            elif isinstance(frame, Release):
                self.table.release(frame.lane_id, frame.rid.tolist(), item.owner)
            else:
                self.table.hang_up(item.owner)
        self.table.expire(now_s)
        alive = [s for s in wanted.values() if self.table.get(s.lane_id, s.rid) is s]
        texts = [greedy_continuation(self._ids[s.key], GAMMA) for s in alive]
        block = Block(
            ids=np.array(texts, np.int32).reshape(len(alive), GAMMA),
            confidence=np.full((len(alive), GAMMA), 0.9, np.float32),
            q_ids=np.zeros((0, GAMMA, 0), np.int32),
            q_probs=np.zeros((0, GAMMA, 0), np.float32),
            has_q=np.zeros(len(alive), np.uint8),
        )
        return DraftOutcome(
            drafted=tuple(
                Drafted(
                    lane_id=s.lane_id, rid=s.rid, epoch=s.epoch, anchor=s.covered, digest=s.digest
                )
                for s in alive
            ),
            block=block if alive else None,
            num_draft=np.full(len(alive), GAMMA, np.int32),
            lost=self.table.take_lost(),
        )

    def _commit(
        self, frame: Commit, owner: int, now_s: float, wanted: dict[Key, DraftSession]
    ) -> None:
        ends = np.cumsum(frame.num_rows).tolist()
        for i, end in enumerate(ends):
            ids = frame.ids[end - int(frame.num_rows[i]) : end].tolist()
            key = (frame.lane_id, int(frame.rid[i]))
            session = self.table.commit(
                key=key,
                epoch=int(frame.epoch[i]),
                owner=owner,
                first_position=int(frame.first_position[i]),
                ids=ids,
                digest_after=int(frame.digest[i]),
                now_s=now_s,
            )
            if session is None:
                continue
            self._ids[key] += ids
            wanted.pop(key, None)
            if frame.want_draft[i]:
                wanted[key] = session


async def add_drafter_node(c: Cluster, engine: LawDrafter, member_id: str) -> DrafterNode:
    node = DrafterNode(
        member_id=member_id,
        engine=engine,
        config=c.config,
        directory=c.directory,
        model="fake-target",
        drafter=DRAFTER,
    )
    await node.start()
    return node


async def test_right_drafts_are_all_accepted() -> None:
    engine = LawDrafter()
    async with cluster() as c:
        await c.add_verifier()
        node = await add_drafter_node(c, engine, "drafter-0")
        router = await c.add_router()
        await c.ready(router, drafters=1)
        prompts = [(i, 5, 9) for i in range(1, 9)]
        requests = [make_request(prompt, 30, ignore_eos=True) for prompt in prompts]
        answers = await asyncio.gather(*(ask(router, request) for request in requests))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.ids == greedy_continuation(prompt, 30)
        figures = router.metrics()
        assert figures["num_accepted"] == figures["num_verified"] > 0
        assert figures["stale"] == figures["num_late_drafts"] == figures["num_rebinds"] == 0
        await c.settle()
        await node.stop(grace_s=5.0)
    assert (engine.num_sessions, engine.table.allocator.num_free) == (0, (1 << 14) // 32)


async def test_a_drafter_that_is_too_small_slows_some_requests_and_stops_none() -> None:
    engine = LawDrafter(max_sessions=2)
    async with cluster() as c:
        await c.add_verifier()
        node = await add_drafter_node(c, engine, "drafter-0")
        router = await c.add_router()
        await c.ready(router, drafters=1)
        prompts = [(i, 5, 9) for i in range(1, 9)]
        answers = await asyncio.gather(*(ask(router, make_request(p, 60)) for p in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.ids == expected_ids(prompt, 60)
        assert engine.counters.full > 0
        assert router.metrics()["num_accepted"] > 0
        await node.stop()


@pytest.mark.parametrize("seed", range(10))
async def test_streams_of_a_drafter_may_break_at_any_frame(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sessions go with the verifier's stream, its blocks with the router's; it lives on."""
    rng = random.Random(seed)
    bomb = Bomb(monkeypatch)
    engines = [LawDrafter(), LawDrafter()]
    async with cluster() as c:
        await c.add_verifier()
        nodes = [await add_drafter_node(c, e, f"drafter-{i}") for i, e in enumerate(engines)]
        router = await c.add_router()
        await c.ready(router, drafters=2)
        over = asyncio.Event()
        asking = [
            asyncio.create_task(keep_asking(router, random.Random(rng.random()), over))
            for _ in range(5)
        ]
        for _ in range(5):
            cut = asyncio.Event()

            def fuse(cut: asyncio.Event = cut) -> None:
                server = rng.choice(nodes)._server
                if rng.random() < 0.5:
                    sever(server)
                else:
                    for stream in tuple(itertools.islice(server._streams, 1)):
                        stream.abandon("cut")
                cut.set()

            bomb.arm(rng.randrange(1, 80), fuse)
            await cut.wait()
        over.set()
        assert min(await asyncio.gather(*asking)) > 0
        await c.settle()
        for node in nodes:
            await node.stop(grace_s=5.0)
    for engine in engines:
        assert engine.num_sessions == 0
        assert engine.table.allocator.num_free == (1 << 14) // 32
        assert engine.counters.diverged == engine.counters.gaps == 0
