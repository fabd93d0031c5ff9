"""The whole round over real loopback streams, against the fake target's known greedy text."""

from __future__ import annotations

import asyncio

from router.node import RouterNode
from tests.frames import make_sampling
from tests.router.harness import ask, cluster, expected_ids, make_request, text_of

PROMPTS = [tuple((7 * i + j) % 90 + 1 for j in range(1 + i % 13)) for i in range(16)]


async def assert_right(router: RouterNode, prompt: tuple[int, ...], num_tokens: int = 24) -> None:
    answer = await ask(router, make_request(prompt, num_tokens))
    expected = expected_ids(prompt, num_tokens)
    assert answer.ids == expected
    assert answer.text == text_of(expected)
    assert answer.finish == ("length" if len(expected) == num_tokens else "stop")
    assert answer.usage.num_completion_tokens == len(expected)


async def test_one_request_without_drafters() -> None:
    async with cluster() as c:
        await c.add_verifier()
        router = await c.add_router()
        await c.ready(router)
        await assert_right(router, PROMPTS[3])


async def test_one_request_with_drafter() -> None:
    async with cluster() as c:
        await c.add_verifier()
        await c.add_drafter()
        router = await c.add_router()
        await c.ready(router, drafters=1)
        answer = await ask(router, make_request(PROMPTS[3], 24))
        assert answer.ids == expected_ids(PROMPTS[3], 24)
        usage = answer.usage
        assert usage.num_rounds < 24 / 2, "right drafts save rounds"
        assert usage.num_accepted == usage.num_completion_tokens - 1 - usage.num_rounds
        assert usage.num_accepted <= usage.num_verified <= usage.num_proposed
        figures = router.metrics()
        assert figures["num_accepted"] == usage.num_accepted
        assert figures["stale"] == 0, figures
        assert figures["num_late_drafts"] == 0


async def test_sixteen_concurrent() -> None:
    async with cluster() as c:
        await c.add_verifier()
        await c.add_drafter(num_right=2)
        router = await c.add_router()
        await c.ready(router, drafters=1)
        await asyncio.gather(*(assert_right(router, p, 8 + 3 * i) for i, p in enumerate(PROMPTS)))
        assert router.metrics()["num_real_tokens"] > router.metrics()["num_steps"]


async def test_garbage_drafts_change_nothing_but_speed() -> None:
    async with cluster() as c:
        await c.add_verifier()
        await c.add_drafter(num_right=0)
        router = await c.add_router()
        await c.ready(router, drafters=1)
        await asyncio.gather(*(assert_right(router, prompt) for prompt in PROMPTS[:6]))
        figures = router.metrics()
        assert figures["num_verified"] > 0
        assert figures["num_accepted"] == 0


async def test_drafting_off_asks_for_no_blocks() -> None:
    async with cluster() as c:
        await c.add_verifier()
        drafter = await c.add_drafter()
        router = await c.add_router()
        await c.ready(router, drafters=1)
        plain = await ask(router, make_request(PROMPTS[2], draft=False))
        assert plain.ids == expected_ids(PROMPTS[2], 24)
        assert drafter.num_opens == 0
        assert plain.usage.num_proposed == 0


async def test_coupled_sampling_gives_the_same_text_with_and_without_drafts() -> None:
    sampling = make_sampling(temperature=1.0, seed=7)
    async with cluster() as c:
        await c.add_verifier()
        await c.add_drafter(num_right=3)
        router = await c.add_router()
        await c.ready(router, drafters=1)
        drafted, plain = [
            await ask(router, make_request(PROMPTS[5], sampling=sampling, draft=draft))
            for draft in (True, False)
        ]
        assert drafted.ids == plain.ids
        assert drafted.ids != expected_ids(PROMPTS[5], 24), "this seed does not sample greedily"
        assert drafted.usage.num_verified > 0


async def test_one_router_over_two_verifiers_uses_both() -> None:
    async with cluster() as c:
        for member_id in ("verifier-0", "verifier-1"):
            await c.add_verifier(member_id)
        await c.add_drafter()
        router = await c.add_router()
        await c.ready(router, lanes=2, drafters=1)
        await asyncio.gather(*(assert_right(router, prompt) for prompt in PROMPTS))
        assert all(engine.num_steps > 0 for engine in c.engines.values())


async def test_requests_spread_over_drafters_and_stay_there() -> None:
    async with cluster() as c:
        await c.add_verifier()
        drafters = [await c.add_drafter(member_id=f"drafter-{i}") for i in range(2)]
        router = await c.add_router()
        await c.ready(router, drafters=2)
        await asyncio.gather(*(assert_right(router, prompt) for prompt in PROMPTS[:8]))
        assert [drafter.num_opens for drafter in drafters] == [4, 4]
        assert not any(drafter.faults for drafter in drafters)


async def test_more_requests_than_the_verifier_holds() -> None:
    async with cluster() as c:
        await c.add_verifier(max_requests=3)
        await c.add_drafter()
        router = await c.add_router()
        await c.ready(router, drafters=1)
        await asyncio.gather(*(assert_right(router, prompt) for prompt in PROMPTS))


async def test_kv_is_reserved_so_that_the_verifier_never_runs_out() -> None:
    async with cluster() as c:
        await c.add_verifier(kv_blocks=5)  # 80 positions: two of these requests, not three
        router = await c.add_router()
        await c.ready(router)
        await asyncio.gather(*(assert_right(router, prompt) for prompt in PROMPTS[:6]))
        assert router.metrics()["num_retries"] == 0


async def test_long_prompts_are_prefilled_in_chunks_beside_decoding() -> None:
    long = tuple(i % 90 + 1 for i in range(150))
    async with cluster(prefill_budget=16) as c:
        await c.add_verifier()
        await c.add_drafter()
        router = await c.add_router()
        await c.ready(router, drafters=1)
        await asyncio.gather(*(assert_right(router, p) for p in (PROMPTS[1], long, PROMPTS[2])))
        assert router.metrics()["num_prefill_tokens"] == 150 + len(PROMPTS[1]) + len(PROMPTS[2])


async def test_an_idle_lane_sends_no_steps() -> None:
    async with cluster() as c:
        await c.add_verifier()
        router = await c.add_router()
        await c.ready(router)
        await assert_right(router, PROMPTS[0])
        await c.settle()
        before = c.engines["verifier-0"].num_steps
        await asyncio.sleep(0.2)
        assert c.engines["verifier-0"].num_steps == before
