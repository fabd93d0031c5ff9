"""Requests lent between routers by Submit, Emit and Cancel."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import pytest

from cluster.errors import DeadlineExceeded, PromptTooLong
from router.node import RouterNode
from tests.frames import make_sampling
from tests.router.harness import (
    Answer,
    Cluster,
    ask,
    cluster,
    eventually,
    expected_ids,
    make_request,
    text_of,
)

PROMPT = (39, 4, 66)
TEXT = expected_ids(PROMPT, 200)


async def owner_and_other(
    c: Cluster, *, delay_s: float = 0.0, **engine: int
) -> tuple[RouterNode, RouterNode]:
    """Two routers over one verifier: its owner, and the one that must lend."""
    await c.add_verifier(delay_s=lambda _: delay_s, **engine)
    await c.add_drafter()
    owner = await c.add_router("router-0")
    await c.ready(owner, drafters=1)
    other = await c.add_router("router-1")
    await eventually(
        lambda: (
            other._service.line.peers.keys() == {"router-0"}
            and other._service.line.peers["router-0"].details["free_slots"] > 0
        ),
        "the second router does not see the first one's lane",
    )
    return owner, other


async def test_second_router_lends_its_requests() -> None:
    async with cluster() as c:
        owner, other = await owner_and_other(c)
        sampling = make_sampling(logprobs=True)
        answers = await asyncio.gather(
            *(
                ask(router, make_request((*PROMPT, i), 30, sampling=sampling))
                for i, router in enumerate([other, owner, other, other], start=1)
            )
        )
        for i, answer in enumerate(answers, start=1):
            expected = expected_ids((*PROMPT, i), 30)
            assert answer.ids == expected
            assert answer.text == text_of(expected)
            assert answer.usage.num_completion_tokens == len(expected)
            assert all(len(d.logprobs) == len(d.token_ids) for d in answer.deltas)
        assert sum(answer.usage.num_accepted for answer in answers) > 0
        assert other.metrics()["num_forwarded"] == 3
        assert other.metrics()["lanes"] == 0


async def test_lent_requests_keep_their_stop_strings_and_refusals() -> None:
    async with cluster() as c:
        _, other = await owner_and_other(c)
        request = make_request(PROMPT, 40, stop_strings=(text_of(TEXT[9:12]),))
        answer = await ask(other, request)
        assert answer.text == text_of(TEXT[:9])
        assert answer.ids == TEXT[:12]
        assert answer.finish == "stop"


async def test_refusal_by_the_owner_reaches_the_client() -> None:
    prompt = tuple(i % 90 + 1 for i in range(100))
    async with cluster() as c:
        _, other = await owner_and_other(c, kv_blocks=4)  # 64 positions, known to the owner only
        with pytest.raises(PromptTooLong):
            await ask(other, make_request(prompt, 30))


@pytest.mark.parametrize("at", ["origin", "owner"])
async def test_cancel_of_a_lent_request_at_either_router(at: str) -> None:
    async with cluster() as c:
        owner, other = await owner_and_other(c, delay_s=0.005)
        answer = Answer()
        request = make_request(PROMPT, 200)
        asking = asyncio.create_task(ask(other, request, answer))
        await eventually(lambda: len(answer.deltas) > 2, "never started")
        assert await (other if at == "origin" else owner).cancel(request.request_id)
        await asking
        assert answer.finish == "cancelled"
        assert answer.ids == TEXT[: len(answer.ids)]


async def test_an_id_may_be_used_again_right_after_a_cancel() -> None:
    """What the owner still says of the first request is not taken for the second one's."""
    async with cluster() as c:
        _, other = await owner_and_other(c, delay_s=0.002)
        for _ in range(5):
            answer = Answer()
            asking = asyncio.create_task(ask(other, make_request(PROMPT, 200), answer))
            await eventually(lambda answer=answer: len(answer.deltas) > 2, "never started")
            assert await other.cancel(make_request(PROMPT).request_id)
            await asking
            again = await ask(other, make_request(PROMPT, 20))
            assert again.ids == TEXT[:20]
        assert other.metrics()["num_forwarded"] == 10, "no stream broke over it"


async def test_cancel_finds_the_router_that_an_id_names() -> None:
    async with cluster() as c:
        owner, other = await owner_and_other(c, delay_s=0.005)
        answer = Answer()
        request = make_request(PROMPT, 200, request_id=owner.new_request_id())
        asking = asyncio.create_task(ask(owner, request, answer))
        await eventually(lambda: len(answer.deltas) > 2, "never started")
        assert await other.cancel(request.request_id)
        await asking
        assert answer.finish == "cancelled"
        assert not await other.cancel(request.request_id)
        assert not await other.cancel(other.new_request_id())
        assert not await other.cancel("nobody's")


async def test_closing_the_stream_and_deadlines_free_the_owner() -> None:
    async with cluster() as c:
        _, other = await owner_and_other(c, delay_s=0.005)
        async with contextlib.aclosing(other.generate(make_request(PROMPT, 200))) as stream:
            async for _ in stream:
                break
        await c.settle()
        with pytest.raises(DeadlineExceeded):
            await ask(other, make_request(PROMPT, 240, deadline_s=0.2, draft=False))


async def test_owner_leaves_and_the_other_goes_on_with_its_verifier() -> None:
    async with cluster() as c:
        owner, other = await owner_and_other(c, delay_s=0.005)
        answer = Answer()
        request = make_request(PROMPT, 120, stop_strings=("never there",))
        asking = asyncio.create_task(ask(other, request, answer))
        await eventually(lambda: len(answer.deltas) > 2, "never started")
        c.routers.remove(owner)
        await owner.stop()
        await asking
        assert answer.ids == TEXT[:120]
        assert answer.text == text_of(TEXT[:120])
        assert other.metrics()["lanes"] == 1
        usage = answer.usage
        assert usage.num_completion_tokens == 120
        assert usage.num_accepted <= usage.num_verified <= usage.num_proposed


async def test_own_verifier_dies_and_the_request_goes_on_at_the_other_router() -> None:
    async with cluster() as c:
        first = await c.add_router("router-0")
        second = await c.add_router("router-1")
        # Both routers are known before the first verifier comes, so each takes one.
        await eventually(
            lambda: all(len(r._service.line.peers) == 1 for r in (first, second)), "strangers"
        )
        for i in range(2):
            await c.add_verifier(f"verifier-{i}", delay_s=lambda _: 0.005)
        await c.ready(first)
        await c.ready(second)
        answer = Answer()
        asking = asyncio.create_task(ask(first, make_request(PROMPT, 120), answer))
        await eventually(lambda: len(answer.deltas) > 2, "never started")
        mine = next(v for v in c.verifiers.values() if v.describe().lane_owner == "router-0")
        await c.kill_verifier(mine.member_id)
        await asking
        assert answer.ids == TEXT[:120]
        assert answer.text == text_of(TEXT[:120])
        assert first.metrics()["num_forwarded"] == 1


async def test_a_full_owner_makes_the_request_wait_not_fail() -> None:
    async with cluster(max_queued_requests=2) as c:
        owner, other = await owner_and_other(c, delay_s=0.005, max_requests=1)
        crowd = [
            asyncio.create_task(ask(owner, make_request((*PROMPT, i, i), 12))) for i in range(1, 4)
        ]
        await eventually(lambda: owner.metrics()["queued"] == 2, "the owner is not full")
        # As if the directory had not heard of it yet: the owner itself must refuse.
        stale = other._service.line.peers["router-0"]
        request = make_request(PROMPT, 12)
        other._service.line.peers["router-0"] = dataclasses.replace(
            stale, details={"free_slots": 9.0, "slots": 9.0}
        )
        answer = await ask(other, request)
        assert answer.ids == TEXT[:12]
        await asyncio.gather(*crowd)
        assert other.metrics()["num_forwarded"] >= 1
