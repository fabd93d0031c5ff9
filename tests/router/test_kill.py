"""Any member killed at any point of a round: no token lost, doubled or misplaced, nothing leaked.

The point is a number of frames: the victim dies as the n-th frame of the run arrives anywhere.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cluster import frame_stream
from cluster.streams import DataServer
from cluster.wire import Sampling, decode
from router.node import RouterNode
from tests.fakes import FakeEngine
from tests.frames import Row, make_admission, make_sampling, make_step
from tests.router.harness import (
    EOS,
    Cluster,
    ask,
    cluster,
    make_request,
    text_of,
)

NUM_SEEDS = 20
KILLS_PER_SEED = 5


def sever(server: DataServer) -> None:
    """Break all streams of a member without a word, as if its process had been killed."""
    for stream in tuple(server._streams):
        stream.abandon("killed")


class Bomb:
    """Calls ``fuse`` as the n-th frame from now on is received, wherever that is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._left = 0
        self._fuse: Callable[[], None] = lambda: None

        def counting(data: bytes) -> Any:
            self._left -= 1
            if self._left == 0:
                self._fuse()
            return decode(data)

        monkeypatch.setattr(frame_stream, "decode", counting)

    def arm(self, num_frames: int, fuse: Callable[[], None]) -> None:
        self._left, self._fuse = num_frames, fuse


async def cut_one(c: Cluster, rng: random.Random, bomb: Bomb) -> None:
    """Break the router's stream to one verifier at a random frame; both ends live on."""
    went_off = asyncio.Event()

    def fuse() -> None:
        lanes = c.routers[0]._lanes
        if lanes:
            lanes[rng.choice(sorted(lanes))]._stream.abandon("cut")
        went_off.set()

    bomb.arm(rng.randrange(1, 60), fuse)
    await went_off.wait()


async def kill_one(c: Cluster, rng: random.Random, bomb: Bomb, names: itertools.count[int]) -> None:
    """Kill a member at a random frame, and put a new one in its place."""
    went_off = asyncio.Event()
    verifier_dies = rng.random() < 0.5
    pool: dict[str, Any] = c.verifiers if verifier_dies else c.drafters  # type: ignore[assignment]
    victim = rng.choice(sorted(pool))

    def fuse() -> None:
        sever(pool[victim]._server)
        went_off.set()

    bomb.arm(rng.randrange(1, 60), fuse)
    await went_off.wait()
    same_name = rng.random() < 0.5  # as a restarted process that kept its name, elsewhere
    name = victim if same_name else f"{victim.split('-')[0]}-{next(names)}"
    if verifier_dies:
        await c.kill_verifier(victim)
        await c.add_verifier(name)
    else:
        await c.kill_drafter(victim)
        await c.add_drafter(member_id=name, num_right=rng.randrange(5))


def alone(prompt: tuple[int, ...], sampling: Sampling, num_tokens: int) -> list[int]:
    """The text of a request that meets no fault, no draft and no other request."""
    engine = FakeEngine()
    admission = make_admission(
        1, prompt, sampling=sampling, max_new_tokens=num_tokens, stop_ids=np.array([EOS], np.int32)
    )
    ids = [*prompt, *engine.step(make_step(admissions=(admission,))).result.token_ids.tolist()]
    while engine.live:
        ids += engine.step(make_step([Row(rid=1, ids=ids)])).result.token_ids.tolist()
    return ids[len(prompt) :]


def any_sampling(rng: random.Random) -> Sampling:
    """Greedy or coupled, with or without a memory of what was emitted before a fault."""
    return make_sampling(
        temperature=rng.choice([0.0, 0.7]),
        seed=rng.randrange(1 << 40),
        logprobs=rng.random() < 0.5,
        **rng.choice([{}, {"frequency_penalty": 1.5, "repetition_penalty": 1.3}]),
    )


async def keep_asking(router: RouterNode, rng: random.Random, over: asyncio.Event) -> int:
    """Requests one after the other until told to stop; each must be answered in full."""
    num_asked = 0
    while not over.is_set():
        prompt = tuple(rng.randrange(1, 90) for _ in range(rng.randrange(1, 30)))
        num_tokens = rng.randrange(1, 60)
        sampling = any_sampling(rng)
        request = make_request(
            prompt, num_tokens, sampling=sampling, request_id=f"{rng.random()}-{num_asked}"
        )
        answer = await ask(router, request)
        assert answer.ids == alone(prompt, sampling, num_tokens)
        assert answer.text == text_of(answer.ids)
        num_logprobs = sum(len(delta.logprobs) for delta in answer.deltas)
        assert num_logprobs == sampling.logprobs * len(answer.ids)
        assert answer.usage.num_completion_tokens == len(answer.ids)
        num_asked += 1
    return num_asked


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
async def test_any_member_may_die_at_any_frame(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    bomb = Bomb(monkeypatch)
    names = itertools.count(10)
    two_flights = seed % 2 == 1  # steps long enough, and taken up so soon, that the next one queues
    scheduling = {"gather": "when_free"} if two_flights else {}
    async with cluster(scheduling=scheduling) as c:
        for i in range(2):
            await c.add_verifier(f"verifier-{i}", delay_s=lambda _: 0.004 * two_flights)
            await c.add_drafter(member_id=f"drafter-{i}", num_right=3)
        router = await c.add_router()
        await c.ready(router, lanes=2, drafters=2)
        over = asyncio.Event()
        asking = [
            asyncio.create_task(keep_asking(router, random.Random(rng.random()), over))
            for _ in range(6)
        ]
        for _ in range(KILLS_PER_SEED):
            if rng.random() < 0.2:
                await cut_one(c, rng, bomb)
            else:
                await kill_one(c, rng, bomb, names)
        over.set()
        assert min(await asyncio.gather(*asking)) > 0
        if two_flights:
            assert router.metrics()["num_queued_steps"] > 0
        await c.settle()
        for verifier in c.verifiers.values():
            assert verifier.cache.num_bytes == 0
            assert verifier.describe().details["kv_free_blocks"] == 256
        assert not any(router._book.num_bound().values())
        assert not any(drafter.faults for drafter in c.drafters.values())


@pytest.mark.parametrize("seed", range(10))
async def test_the_stream_between_two_routers_may_break_at_any_frame(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    bomb = Bomb(monkeypatch)
    async with cluster() as c:
        await c.add_verifier()
        await c.add_drafter(num_right=3)
        owner = await c.add_router("router-0")
        await c.ready(owner, drafters=1)
        other = await c.add_router("router-1")
        over = asyncio.Event()
        asking = [
            asyncio.create_task(keep_asking(router, random.Random(rng.random()), over))
            for router in (owner, other, other, other)
        ]
        for _ in range(KILLS_PER_SEED):
            cut = asyncio.Event()

            def fuse(cut: asyncio.Event = cut) -> None:
                sever(owner._server)
                cut.set()

            bomb.arm(rng.randrange(1, 60), fuse)
            await cut.wait()
            await asyncio.sleep(0.05)  # until requests are lent again
        over.set()
        assert min(await asyncio.gather(*asking)) > 0
        assert other.metrics()["num_forwarded"] > 0
        assert other.metrics()["lanes"] == 0
