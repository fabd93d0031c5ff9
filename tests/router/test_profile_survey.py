"""The profiles of all routers, asked of any one of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.errors import ConfigError, FrameError
from cluster.members import Member
from cluster.profile_snapshot import ProfileSnapshot
from cluster.streams import DataServer, FrameStream
from cluster.wire import Pong, Profile
from router.node import RouterNode
from router.profile_report import read_report, whole_report
from router.profile_survey import survey
from tests.frames import make_hello
from tests.router.harness import Cluster, ask, cluster, eventually, make_request

PROMPT = (39, 4, 66)
OWN: dict[str, Any] = {"router": "router-0", "verifiers": [], "drafters": []}


async def two_routers(c: Cluster) -> tuple[RouterNode, RouterNode]:
    """Each leads one of two verifiers, and has served a request."""
    first = await c.add_router("router-0")
    second = await c.add_router("router-1")
    await c.add_drafter()
    await eventually(
        lambda: all(router.num_members("router") == 2 for router in (first, second)), "strangers"
    )
    await c.add_verifier("verifier-0")
    await c.add_verifier("verifier-1")
    for router in (first, second):
        await c.ready(router, drafters=1)
        await ask(router, make_request(PROMPT, 24))
    return first, second


async def test_any_router_tells_of_all_verifiers() -> None:
    async with cluster() as c:
        for router in await two_routers(c):
            told = json.loads(json.dumps(await router.profiles(), allow_nan=False))
            assert told["router"] == router.member_id
            assert told["routers"] == ["router-0", "router-1"]
            assert told["unanswered"] == told["untold"] == []
            assert {v["verifier"] for v in told["verifiers"]} == {"verifier-0", "verifier-1"}
            assert {v["router"] for v in told["verifiers"]} == {"router-0", "router-1"}
            for verifier in told["verifiers"]:
                assert ProfileSnapshot.from_json(verifier["profile"]).num_steps > 0
            assert [link["router"] for link in told["drafters"]] == ["router-0", "router-1"]
            for link in told["drafters"]:
                assert link["num_samples"] > 0
                assert link["draft_s"]["16"] >= link["draft_s"]["1"]


async def test_a_router_without_a_lane_tells_the_others_tables() -> None:
    async with cluster() as c:
        await c.add_verifier()
        await c.add_drafter()
        owner = await c.add_router("router-0")
        await c.ready(owner, drafters=1)
        (link,) = (await owner.profiles())["drafters"]
        assert link["round_trip_s"] is None, "no block has come yet"
        other = await c.add_router("router-1")
        await eventually(lambda: other.is_serving, "the lane of the first router is not known")
        assert other.num_members("verifier") == other.num_members("drafter") == 1
        told = await other.profiles()
        assert other.metrics()["lanes"] == 0
    (verifier,) = told["verifiers"]
    assert (verifier["verifier"], verifier["router"]) == ("verifier-0", "router-0")


@contextlib.asynccontextmanager
async def answering(answer: Any, member_id: str) -> AsyncIterator[Member]:
    """A router that answers whatever it is asked with one frame, or, with None, not at all."""

    async def serve(stream: FrameStream) -> None:
        await stream.recv()
        if answer is not None:
            await stream.send(answer)
        await stream.recv()

    hello = make_hello(member_id=member_id)
    server = DataServer(hello=hello, on_stream=serve, accept_roles=frozenset({"router"}))
    await server.start()
    try:
        yield router_at(server.address, member_id)
    finally:
        await server.stop(0.0)


def router_at(address: str, member_id: str) -> Member:
    return Member(
        member_id=member_id,
        role="router",
        address=address,
        incarnation=1,
        model="",
        drafter="",
        load=0.0,
    )


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "no answer within 0.5 s"),
        (Pong(nonce=1), "Pong in answer"),
        (Profile(nonce=1, json="{"), "no JSON"),
        (Profile(nonce=1, json="[]"), "malformed"),
    ],
    ids=["silent", "another frame", "no JSON", "no report"],
)
async def test_who_does_not_answer_is_named_with_the_reason(answer: Any, why: str) -> None:
    async with answering(answer, "router-1") as bad:
        told = await survey(
            OWN, [router_at("", "router-0"), bad], hello=make_hello(), timeout_s=0.5
        )
    assert told["routers"] == ["router-0"]
    (unanswered,) = told["unanswered"]
    assert unanswered["router"] == "router-1"
    assert why in unanswered["why"]


async def test_all_are_asked_at_once() -> None:
    """Each of the silent ones costs the whole wait; one after the other it would add up."""
    async with contextlib.AsyncExitStack() as stack:
        silent = [
            await stack.enter_async_context(answering(None, f"router-{n}")) for n in range(1, 9)
        ]
        async with asyncio.timeout(8 * 1.0):
            told = await survey(OWN, silent, hello=make_hello(), timeout_s=1.0)
    assert len(told["unanswered"]) == 8


async def test_a_router_that_is_gone_hides_nothing_of_the_others() -> None:
    async with cluster() as c:
        await c.add_verifier()
        router = await c.add_router("router-0")
        await c.ready(router)
        await c.directory.heartbeat(router_at("127.0.0.1:1", "router-9"))
        await eventually(lambda: router.num_members("router") == 2, "the directory is not read")
        told = await router.profiles()
    assert [v["verifier"] for v in told["verifiers"]] == ["verifier-0"]
    (unanswered,) = told["unanswered"]
    assert unanswered["router"] == "router-9"
    assert "cannot reach router at 127.0.0.1:1" in unanswered["why"]


async def test_a_survey_without_a_bound_is_refused() -> None:
    with pytest.raises(ConfigError, match="timeout_s"):
        await survey(OWN, [], hello=make_hello(), timeout_s=0.0)


def test_a_live_verifier_that_nobody_tells_of_is_named() -> None:
    def verifier(member_id: str, owner: str) -> Member:
        return Member(
            member_id=member_id,
            role="verifier",
            address="127.0.0.1:1",
            incarnation=1,
            model="",
            drafter="",
            load=0.0,
            lane_owner=owner,
        )

    told = whole_report(
        {**OWN, "verifiers": [{"verifier": "a", "profile": {}}]},
        [],
        unanswered={"router-1": "gone"},
        members=[verifier("a", "router-0"), verifier("b", "router-1"), verifier("c", "")],
    )
    assert told["untold"] == [
        {"verifier": "b", "router": "router-1"},
        {"verifier": "c", "router": ""},
    ]


@pytest.mark.parametrize(
    "report",
    [
        "null",
        "{}",
        '{"verifiers": [], "drafters": {}}',
        '{"verifiers": [1], "drafters": []}',
        '{"verifiers": [{"verifier": "v", "profile": {}}], "drafters": []}',
        '{"verifiers": [], "drafters": [{"sessions": 1}]}',
        "[" * 100_000,
    ],
)
def test_reports_that_are_none(report: str) -> None:
    with pytest.raises(FrameError, match="router-7"):
        read_report(report, "router-7")
