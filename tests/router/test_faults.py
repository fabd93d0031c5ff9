"""Faults around the round: the text never changes, whatever the drafters do or who dies."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cluster.errors import Unavailable
from cluster.members import Member
from cluster.streams import FrameStream
from cluster.wire import Blocks, Drain, Frame, StepResult, encode
from router.lane import Lane
from router.node import RouterNode
from tests.fakes import FakeDrafter, greedy_continuation
from tests.frames import make_blocks, make_commit
from tests.router.harness import (
    DRAFTER,
    Answer,
    ask,
    cluster,
    eventually,
    expected_ids,
    make_request,
    text_of,
)

PROMPT = (5, 17, 40, 2, 9)
Twist = Callable[[Blocks], Blocks]


class TwistedDrafter(FakeDrafter):
    """Sends its right blocks in another shape, or not at all; ``raw`` bytes past every check."""

    def __init__(self, twist: Twist | bytes, *, delay_s: float = 0.0, **options: Any) -> None:
        super().__init__(drafter=DRAFTER, **options)
        self._twist = twist
        self._delay_s = delay_s

    async def _draft(self, lane_id: str, rid: int, session: Any) -> None:
        await asyncio.sleep(self._delay_s)
        router = self._routers.get(lane_id)
        if router is None or router.closed:
            return
        if isinstance(self._twist, bytes):
            router._outbox.force_put(self._twist, len(self._twist))
            return
        draft = greedy_continuation(session.ids, self._gamma, self._vocab_size)
        block = make_blocks(rid, session.epoch, session.ids, draft, drafter_id=self.member_id)
        await router.send(self._twist(block))


def changed(**changes: Any) -> Twist:
    return lambda block: dataclasses.replace(block, **changes)


def shifted(name: str, by: int) -> Twist:
    return lambda block: dataclasses.replace(
        block, **{name: (getattr(block, name) + by).astype(getattr(block, name).dtype)}
    )


async def run_twisted(drafter: FakeDrafter, **config: Any) -> dict[str, float]:
    async with cluster(**config) as c:
        await c.add_verifier()
        await c.add_drafter(drafter)
        router = await c.add_router()
        await c.ready(router, drafters=1)
        answers = await asyncio.gather(
            *(ask(router, make_request((*PROMPT, i))) for i in range(1, 4))
        )
        for i, answer in enumerate(answers, start=1):
            assert answer.ids == expected_ids((*PROMPT, i), 24)
            assert answer.text == text_of(answer.ids)
        return router.metrics()


@pytest.mark.parametrize(
    ("reason", "twist"),
    [
        ("epoch", shifted("epoch", 1)),
        ("anchor", shifted("anchor", -1)),
        ("anchor", shifted("anchor", 1)),
        ("digest", shifted("digest", 1)),
        ("unknown", shifted("rid", 1000)),
        ("lane", shifted("rid", 1 << 40)),
    ],
)
async def test_stale_blocks_are_counted_and_not_used(reason: str, twist: Twist) -> None:
    figures = await run_twisted(TwistedDrafter(twist), draft_timeout_s=0.02)
    assert figures[f"stale.{reason}"] > 0
    assert figures["num_verified"] == 0


@pytest.mark.parametrize(
    "twist",
    [
        changed(num_draft=np.array([5], np.int32)),
        changed(ids=np.full((1, 4), 97, np.int32)),
        changed(
            has_q=np.ones(1, np.uint8),
            q_ids=np.zeros((1, 4, 2), np.int32),
            q_probs=np.full((1, 4, 2), 0.5, np.float32),
        ),
        changed(
            has_q=np.ones(1, np.uint8),
            q_ids=np.zeros((1, 3, 1), np.int32),
            q_probs=np.ones((1, 3, 1), np.float32),
        ),
    ],
)
async def test_malformed_blocks_are_no_blocks(twist: Twist) -> None:
    figures = await run_twisted(TwistedDrafter(twist))
    assert figures["num_malformed"] > 0
    assert figures["num_verified"] == 0


@pytest.mark.parametrize(
    "hostile", [b"\x93garbage", encode(Drain(deadline_s=1.0))[:-3], encode(make_commit())]
)
async def test_a_hostile_frame_costs_the_drafter_its_stream(hostile: bytes) -> None:
    figures = await run_twisted(TwistedDrafter(hostile))
    assert figures["num_refused_frames"] > 0
    assert figures["num_verified"] == 0


async def test_drafts_that_never_come() -> None:
    figures = await run_twisted(FakeDrafter(drafter=DRAFTER, sends_blocks=False))
    assert figures["num_late_drafts"] > 0
    assert figures["num_proposed"] == 0


async def test_drafts_that_come_too_late() -> None:
    slow = TwistedDrafter(lambda block: block, delay_s=0.05)
    figures = await run_twisted(slow, draft_timeout_s=0.01)
    assert figures["num_late_drafts"] > 0


async def test_drafts_that_outrun_the_result_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and blocks travel on two streams: nothing says which arrives first."""
    send = FrameStream.send

    async def slow_results(stream: FrameStream, frame: Frame) -> None:
        await asyncio.sleep(0.02 * isinstance(frame, StepResult))
        await send(stream, frame)

    monkeypatch.setattr(FrameStream, "send", slow_results)
    figures = await run_twisted(FakeDrafter(drafter=DRAFTER))
    assert figures["stale"] == figures["num_late_drafts"] == 0
    assert figures["num_accepted"] == figures["num_verified"] > 0


async def test_a_fault_of_ours_costs_the_link_once_not_for_good(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    take, faults = Lane.take_block, [RuntimeError("a bug of ours")]

    def take_or_fail(lane: Lane, drafter_id: str, block: Any) -> None:
        if faults:
            raise faults.pop()
        take(lane, drafter_id, block)

    monkeypatch.setattr(Lane, "take_block", take_or_fail)
    async with cluster() as c:
        await c.add_verifier()
        await c.add_drafter()
        router = await c.add_router()
        await c.ready(router, drafters=1)
        assert (await ask(router, make_request(PROMPT))).ids == expected_ids(PROMPT, 24)
        assert "a bug of ours" in caplog.text
        await c.ready(router, drafters=1)
        again = await ask(router, make_request(PROMPT))
        assert again.ids == expected_ids(PROMPT, 24)
        assert again.usage.num_accepted > 0


async def test_a_directory_that_misbehaves_ends_no_router(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster() as c:
        await c.add_verifier()
        router = await c.add_router()
        await c.ready(router)
        calls = itertools.count()

        async def members() -> tuple[Member, ...]:
            next(calls)
            raise RuntimeError("not even an error of ours")

        monkeypatch.setattr(c.directory, "members", members)
        await eventually(lambda: next(calls) > 2, "the router asks no more")
        router.check_health()
        assert (await ask(router, make_request(PROMPT))).ids == expected_ids(PROMPT, 24)


async def test_a_lost_session_is_opened_anew() -> None:
    async with cluster() as c:
        await c.add_verifier(delay_s=lambda _: 0.01)
        drafter = await c.add_drafter()
        router = await c.add_router()
        await c.ready(router, drafters=1)
        answer = Answer()
        asking = asyncio.create_task(ask(router, make_request(PROMPT, 200), answer))
        await eventually(lambda: len(answer.deltas) > 2, "the request never started")
        (lane_id, rid) = next(iter(drafter.sessions))
        await drafter.lose(lane_id, rid)
        await asking
        assert answer.ids == expected_ids(PROMPT, 200)
        assert drafter.num_opens == 2
        assert router.metrics()["num_rebinds"] == 1


async def test_drafter_killed_midway_and_back() -> None:
    async with cluster() as c:
        await c.add_verifier(delay_s=lambda _: 0.004)
        await c.add_drafter()
        router = await c.add_router()
        await c.ready(router, drafters=1)
        answer = Answer()
        asking = asyncio.create_task(ask(router, make_request(PROMPT, 240), answer))
        await eventually(lambda: len(answer.deltas) > 3, "the request never started")
        await c.kill_drafter("drafter-0")
        seen = len(answer.ids)
        await eventually(lambda: len(answer.ids) > seen, "it must go on without")
        back = await c.add_drafter()
        await asking
        assert answer.ids == expected_ids(PROMPT, 240)
        assert back.num_opens == 1
        assert back.num_blocks > 0
        assert not back.faults


async def test_drafter_killed_midway_with_another_one_live() -> None:
    async with cluster() as c:
        await c.add_verifier(delay_s=lambda _: 0.004)
        for i in range(2):
            await c.add_drafter(member_id=f"drafter-{i}")
        router = await c.add_router()
        await c.ready(router, drafters=2)
        answer = Answer()
        asking = asyncio.create_task(ask(router, make_request(PROMPT, 240), answer))
        await eventually(lambda: len(answer.deltas) > 3, "the request never started")
        first = next(d for d in c.drafters.values() if d.num_opens)
        second = next(d for d in c.drafters.values() if d is not first)
        await c.kill_drafter(first.member_id)
        await asking
        assert answer.ids == expected_ids(PROMPT, 240)
        assert second.num_blocks > 0
        assert not second.faults


@pytest.mark.parametrize("with_drafter", [False, True])
async def test_verifier_killed_midway_with_another_one_present(with_drafter: bool) -> None:
    async with cluster() as c:
        for i in range(2):
            await c.add_verifier(f"verifier-{i}", delay_s=lambda _: 0.004)
        if with_drafter:
            await c.add_drafter()
        router = await c.add_router()
        await c.ready(router, lanes=2, drafters=int(with_drafter))
        answers = [Answer() for _ in range(6)]
        asking = [
            asyncio.create_task(ask(router, make_request((*PROMPT, i), 120), answer))
            for i, answer in enumerate(answers, start=1)
        ]
        await eventually(lambda: all(len(a.deltas) > 2 for a in answers), "never started")
        await c.kill_verifier("verifier-0")
        await asyncio.gather(*asking)
        for i, answer in enumerate(answers, start=1):
            assert answer.ids == expected_ids((*PROMPT, i), 120)
            assert answer.text == text_of(answer.ids)
            assert answer.usage.num_completion_tokens == len(answer.ids)


def steps_in_the_air(router: RouterNode) -> int:
    """The most of any lane."""
    return max((len(lane.state._flights.steps) for lane in router._lanes.values()), default=0)


async def test_verifier_killed_with_two_steps_in_the_air() -> None:
    async with cluster(scheduling={"gather": "when_free"}) as c:
        await c.add_verifier(delay_s=lambda _: 0.03)
        await c.add_drafter()
        router = await c.add_router()
        await c.ready(router, drafters=1)
        answers = [Answer() for _ in range(8)]
        asking = [
            asyncio.create_task(ask(router, make_request((*PROMPT, i), 120), answer))
            for i, answer in enumerate(answers, start=1)
        ]
        await eventually(lambda: all(len(a.deltas) > 2 for a in answers), "never started")
        await eventually(lambda: steps_in_the_air(router) == 2, "no step is handed over early")
        await c.kill_verifier("verifier-0")
        await c.add_verifier("verifier-1", delay_s=lambda _: 0.004)
        await asyncio.gather(*asking)
        for i, answer in enumerate(answers, start=1):
            assert answer.ids == expected_ids((*PROMPT, i), 120)
            assert answer.usage.num_completion_tokens == len(answer.ids)


async def test_requests_cancelled_with_two_steps_in_the_air() -> None:
    async with cluster(scheduling={"gather": "when_free"}) as c:
        await c.add_verifier(delay_s=lambda _: 0.03)
        await c.add_drafter()
        router = await c.add_router()
        await c.ready(router, drafters=1)
        answers = [Answer() for _ in range(8)]
        requests = [make_request((*PROMPT, i), 120) for i in range(1, 9)]
        asking = [
            asyncio.create_task(ask(router, request, answer))
            for request, answer in zip(requests, answers, strict=True)
        ]
        await eventually(lambda: all(len(a.deltas) > 2 for a in answers), "never started")
        await eventually(lambda: steps_in_the_air(router) == 2, "no step is handed over early")
        for request in requests[::2]:
            assert await router.cancel(request.request_id)
        await asyncio.gather(*asking)
        assert {answer.finish for answer in answers[::2]} == {"cancelled"}
        for request, answer in zip(requests[1::2], answers[1::2], strict=True):
            assert answer.ids == expected_ids(tuple(request.ids), 120)


async def test_verifier_killed_and_replaced() -> None:
    async with cluster() as c:
        await c.add_verifier(delay_s=lambda _: 0.004)
        router = await c.add_router()
        await c.ready(router)
        answer = Answer()
        asking = asyncio.create_task(ask(router, make_request(PROMPT, 60), answer))
        await eventually(lambda: len(answer.deltas) > 2, "the request never started")
        await c.kill_verifier("verifier-0")
        await c.add_verifier("verifier-1")
        await asking
        assert answer.ids == expected_ids(PROMPT, 60)


async def test_verifier_gone_for_good_ends_the_request_with_unavailable() -> None:
    async with cluster(unplaced_timeout_s=0.1) as c:
        await c.add_verifier(delay_s=lambda _: 0.004)
        router = await c.add_router()
        await c.ready(router)
        answer = Answer()
        asking = asyncio.create_task(ask(router, make_request(PROMPT, 200), answer))
        await eventually(lambda: len(answer.deltas) > 2, "the request never started")
        await c.kill_verifier("verifier-0")
        with pytest.raises(Unavailable):
            await asking
        assert answer.ids == expected_ids(PROMPT, 200)[: len(answer.ids)]


async def test_a_verifier_that_does_not_answer_is_taken_for_dead() -> None:
    async with cluster(step_timeout_s=0.2) as c:
        await c.add_verifier("verifier-0", delay_s=lambda _: 1.0)
        router = await c.add_router()
        await c.ready(router)
        asking = asyncio.create_task(ask(router, make_request(PROMPT)))
        await eventually(lambda: c.engines["verifier-0"].num_steps > 0, "never sent")
        await c.add_verifier("verifier-1")
        answer = await asking
        assert answer.ids == expected_ids(PROMPT, 24)


async def test_a_request_that_keeps_losing_its_verifier_ends() -> None:
    async with cluster() as c:
        await c.add_verifier()
        router = await c.add_router()
        await c.ready(router)
        engine = c.engines["verifier-0"]

        def poison(step: Any) -> Any:
            raise RuntimeError("this request breaks the engine")

        healthy, engine.step = engine.step, poison  # type: ignore[method-assign]
        with pytest.raises(Unavailable):
            await ask(router, make_request(PROMPT))
        engine.step = healthy  # type: ignore[method-assign]
        answer = await ask(router, make_request(PROMPT, deadline_s=20.0))
        assert answer.ids == expected_ids(PROMPT, 24), "others go on"
