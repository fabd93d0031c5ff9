"""What a client sees: every request ends exactly once, in the way that it should."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from cluster.errors import (
    BadSamplingParameter,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    TokenOutOfVocabulary,
    Unavailable,
)
from router.node import RouterNode
from router.request import GenerateRequest
from tests.fakes import greedy_continuation
from tests.frames import make_sampling
from tests.router.harness import (
    EOS,
    MAX_MODEL_LEN,
    Answer,
    Cluster,
    ask,
    cluster,
    eventually,
    expected_ids,
    make_request,
    request_id,
    text_of,
)

PROMPT = (38, 4, 66)
TEXT = expected_ids(PROMPT, 200)


async def small(c: Cluster, *, delay_s: float = 0.0) -> RouterNode:
    await c.add_verifier(delay_s=lambda _: delay_s)
    await c.add_drafter()
    router = await c.add_router()
    await c.ready(router, drafters=1)
    return router


async def test_stop_string_across_rounds_and_its_usage() -> None:
    async with cluster() as c:
        router = await small(c)
        whole = await ask(router, make_request(PROMPT, 60))
        starts = [0]
        for delta in whole.deltas:
            starts.append(starts[-1] + len(delta.token_ids))
        edge = starts[4]  # tokens edge-2..edge+1 lie in two rounds
        stop = text_of(TEXT[edge - 2 : edge + 2])
        answer = await ask(router, make_request(PROMPT, 60, stop_strings=("never", stop)))
        assert answer.text == text_of(TEXT[: edge - 2])
        assert answer.ids == TEXT[: edge + 2]
        assert answer.finish == "stop"
        assert answer.usage.num_completion_tokens == edge + 2
        rounds = [d for d in answer.deltas[1:] if d.token_ids]
        assert answer.usage.num_accepted <= sum(len(d.token_ids) for d in rounds)


async def test_text_that_only_looks_like_a_stop_string_is_held_back_and_then_shown() -> None:
    async with cluster() as c:
        router = await small(c)
        almost = text_of(TEXT[10:14]) + "!"
        answer = await ask(router, make_request(PROMPT, 14, stop_strings=(almost,)))
        assert answer.text == text_of(TEXT[:14])
        assert answer.finish == "length"


async def test_stop_id_inside_a_block_ends_the_request_there() -> None:
    place = next(p for p in range(8, 40) if TEXT.index(TEXT[p]) == p)
    async with cluster() as c:
        router = await small(c)
        answer = await ask(router, make_request(PROMPT, 60, stop_ids=(TEXT[place],)))
        assert answer.ids == TEXT[: place + 1]
        assert answer.text == text_of(TEXT[:place]), "the stop token is no text"
        assert answer.finish == "stop"
        assert answer.usage.num_completion_tokens == place + 1


async def test_eos_ends_a_request_unless_ignored() -> None:
    prompt = next((i,) for i in range(1, 90) if EOS in expected_ids((i,), 100)[3:])
    ended = expected_ids(prompt, 100)
    async with cluster() as c:
        router = await small(c)
        answer = await ask(router, make_request(prompt, 100))
        assert answer.ids == ended
        assert answer.finish == "stop"
        on = await ask(router, make_request(prompt, len(ended) + 3, ignore_eos=True))
        assert len(on.ids) == len(ended) + 3
        assert on.finish == "length"


@pytest.mark.parametrize("room", [1, 2, 3, 5, 9])
async def test_max_new_tokens_is_cut_to_the_context(room: int) -> None:
    prompt = tuple(i % 90 + 1 for i in range(MAX_MODEL_LEN - room))
    async with cluster() as c:
        router = await small(c)
        answer = await ask(router, make_request(prompt, 1000, ignore_eos=True))
        assert answer.ids == greedy_continuation(prompt, room)
        assert answer.finish == "length"
        assert router.metrics()["num_retries"] == 0


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 6])
async def test_few_tokens(num_tokens: int) -> None:
    async with cluster() as c:
        router = await small(c)
        answer = await ask(router, make_request(PROMPT, num_tokens))
        assert answer.ids == TEXT[:num_tokens]
        assert answer.finish == "length"
        assert answer.usage.num_verified <= max(num_tokens - 2, 0)


async def test_logprobs_one_per_token_only_when_asked() -> None:
    async with cluster() as c:
        router = await small(c)
        asked = await ask(router, make_request(PROMPT, sampling=make_sampling(logprobs=True)))
        assert all(len(d.logprobs) == len(d.token_ids) for d in asked.deltas)
        assert all(x < 0 for d in asked.deltas for x in d.logprobs)
        plain = await ask(router, make_request(PROMPT))
        assert not any(d.logprobs for d in plain.deltas)


@pytest.mark.parametrize(
    ("error", "request_"),
    [
        (InvalidRequest, make_request(())),
        (TokenOutOfVocabulary, make_request((1, 97))),
        (TokenOutOfVocabulary, make_request((1, -1))),
        (TokenOutOfVocabulary, make_request(PROMPT, stop_ids=(97,))),
        (PromptTooLong, make_request((1,) * MAX_MODEL_LEN)),
        (InvalidRequest, make_request(PROMPT, 0)),
        (InvalidRequest, make_request(PROMPT, deadline_s=0.0)),
        (InvalidRequest, make_request(PROMPT, stop_strings=("",))),
        (InvalidRequest, make_request(PROMPT, stop_strings=("x",) * 65)),
        (InvalidRequest, make_request(PROMPT, stop_strings=("x" * 1025,))),
        (InvalidRequest, make_request(PROMPT, request_id="x" * 257)),
        (BadSamplingParameter, make_request(PROMPT, sampling=make_sampling(temperature=-1.0))),
    ],
)
async def test_bad_requests_are_refused(error: type[Exception], request_: GenerateRequest) -> None:
    async with cluster() as c:
        router = await c.add_router()
        with pytest.raises(error) as caught:
            await ask(router, request_)
        assert caught.value.hint  # type: ignore[attr-defined]


async def test_a_request_id_is_used_once_at_a_time() -> None:
    async with cluster() as c:
        router = await small(c, delay_s=0.005)
        answer = Answer()
        first = asyncio.create_task(ask(router, make_request(PROMPT, 60), answer))
        await eventually(lambda: bool(answer.deltas), "never started")
        with pytest.raises(InvalidRequest):
            await ask(router, make_request(PROMPT, 60))
        assert (await first).ids == TEXT[:60]
        assert (await ask(router, make_request(PROMPT, 6))).ids == TEXT[:6]


async def test_overload_is_refused_at_once_with_a_hint() -> None:
    async with cluster(max_queued_requests=2) as c:
        router = await c.add_router()  # no verifier: everything waits
        waiting = [
            asyncio.create_task(ask(router, make_request((*PROMPT, i)))) for i in range(1, 3)
        ]
        await eventually(lambda: router.metrics()["queued"] == 2, "not queued")
        with pytest.raises(Overloaded) as caught:
            await ask(router, make_request(PROMPT))
        assert caught.value.retry_after_s > 0
        await c.add_verifier()
        for i, answer in enumerate(await asyncio.gather(*waiting), start=1):
            assert answer.ids == expected_ids((*PROMPT, i), 24)


async def test_queue_is_bounded_in_tokens() -> None:
    async with cluster(max_queued_tokens=100) as c:
        router = await c.add_router()
        waiting = asyncio.create_task(ask(router, make_request(PROMPT, 60)))
        await eventually(lambda: router.metrics()["queued"] == 1, "not queued")
        with pytest.raises(Overloaded):
            await ask(router, make_request((*PROMPT, 1), 60))
        assert await router.cancel(request_id(PROMPT))
        assert (await waiting).finish == "cancelled"


async def test_deadline_while_waiting_and_while_running() -> None:
    async with cluster() as c:
        router = await c.add_router()
        with pytest.raises(DeadlineExceeded):
            await ask(router, make_request(PROMPT, deadline_s=0.05))
        await c.add_verifier(delay_s=lambda _: 0.02)
        await c.ready(router)
        answer = Answer()
        with pytest.raises(DeadlineExceeded):
            await ask(router, make_request(PROMPT, 200, deadline_s=0.3, draft=False), answer)
        assert answer.ids == TEXT[: len(answer.ids)]


async def test_cancel_while_waiting() -> None:
    async with cluster() as c:
        router = await c.add_router()
        asking = asyncio.create_task(ask(router, make_request(PROMPT)))
        await eventually(lambda: router.metrics()["queued"] == 1, "not queued")
        assert await router.cancel(request_id(PROMPT))
        answer = await asking
        assert answer.finish == "cancelled"
        assert answer.ids == []


async def test_cancel_while_prefilling() -> None:
    prompt = tuple(i % 90 + 1 for i in range(200))
    async with cluster(prefill_budget=2) as c:
        router = await small(c, delay_s=0.005)
        asking = asyncio.create_task(ask(router, make_request(prompt)))
        await eventually(lambda: router.metrics()["num_prefill_tokens"] > 4, "no prefill")
        assert await router.cancel(request_id(prompt))
        assert (await asking).ids == []


@pytest.mark.parametrize("draft", [True, False])
async def test_cancel_while_decoding(draft: bool) -> None:
    async with cluster() as c:
        router = await small(c, delay_s=0.005)
        answer = Answer()
        request = make_request(PROMPT, 200, draft=draft)
        asking = asyncio.create_task(ask(router, request, answer))
        await eventually(lambda: len(answer.deltas) > 3, "never started")
        assert await router.cancel(request.request_id)
        await asking
        assert answer.finish == "cancelled"
        assert answer.ids == TEXT[: len(answer.ids)]
        assert answer.usage.num_completion_tokens == len(answer.ids)
        assert not await router.cancel(request.request_id), "it is over"


async def test_closing_the_iterator_cancels() -> None:
    async with cluster() as c:
        router = await small(c, delay_s=0.005)
        async with contextlib.aclosing(router.generate(make_request(PROMPT, 200))) as stream:
            async for _ in stream:
                break
        await c.settle()
        assert router.metrics()["ended.cancelled"] == 1


async def test_stop_drains_what_runs_and_refuses_what_comes() -> None:
    async with cluster() as c:
        router = await small(c, delay_s=0.005)
        answer = Answer()
        asking = asyncio.create_task(ask(router, make_request(PROMPT, 40), answer))
        await eventually(lambda: bool(answer.deltas), "never started")
        stopping = asyncio.create_task(router.stop(grace_s=20))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            await ask(router, make_request((*PROMPT, 1)))
        await asyncio.gather(asking, stopping)
        assert answer.ids == TEXT[:40]


async def test_stop_without_grace_ends_what_runs_with_unavailable() -> None:
    async with cluster() as c:
        router = await small(c, delay_s=0.005)
        answer = Answer()
        asking = asyncio.create_task(ask(router, make_request(PROMPT, 200), answer))
        await eventually(lambda: bool(answer.deltas), "never started")
        await router.stop()
        with pytest.raises(Unavailable):
            await asking


async def test_a_draining_verifier_finishes_and_gets_nothing_new() -> None:
    async with cluster() as c:
        router = await small(c, delay_s=0.005)
        answer = Answer()
        asking = asyncio.create_task(ask(router, make_request(PROMPT, 60), answer))
        await eventually(lambda: bool(answer.deltas), "never started")
        draining = asyncio.create_task(c.verifiers["verifier-0"].drain(20))
        await eventually(lambda: c.verifiers["verifier-0"].describe().draining, "not draining")
        await eventually(lambda: router.describe().details["free_slots"] == 0, "still open")
        later = asyncio.create_task(ask(router, make_request((*PROMPT, 1))))
        assert (await asking).ids == TEXT[:60]
        assert await draining
        assert router.metrics()["queued"] == 1
        await c.add_verifier("verifier-1")
        assert (await later).ids == expected_ids((*PROMPT, 1), 24)
