"""Scheduling changed while routers serve."""

from __future__ import annotations

from cluster.config import SchedulingConfig
from router.node import RouterNode
from tests.router.harness import Cluster, ask, cluster, eventually, expected_ids, make_request

PROMPT = (39, 4, 66)
NONE = SchedulingConfig(policy="none")
FULL = SchedulingConfig(policy="full", gate_drafts=False)


async def served(c: Cluster) -> RouterNode:
    await c.add_verifier()
    await c.add_drafter()
    router = await c.add_router("router-0")
    await c.ready(router, drafters=1)
    return router


async def num_verified(router: RouterNode, name: str) -> int:
    """Draft tokens verified for one more request."""
    answer = await ask(router, make_request(PROMPT, 30, request_id=name))
    assert answer.ids == expected_ids(PROMPT, 30), "no schedule changes what is decoded"
    verified: int = answer.usage.num_verified
    return verified


async def test_a_change_takes_hold_of_the_lanes_that_run() -> None:
    async with cluster() as c:
        router = await served(c)
        router.configure(FULL)
        assert await num_verified(router, "a") > 0
        router.configure(NONE)
        assert router.scheduling == NONE
        assert await num_verified(router, "b") == 0
        router.configure(FULL)
        assert await num_verified(router, "c") > 0


async def test_the_owner_of_the_lane_follows_a_router_without_any() -> None:
    async with cluster() as c:
        owner = await served(c)
        other = await c.add_router("router-1")
        other.configure(NONE)
        await eventually(lambda: owner.scheduling == NONE, "the change was not followed")
        assert await num_verified(owner, "a") == 0
        late = await c.add_router("router-2")
        await eventually(lambda: late.scheduling == NONE, "not learnt at start")


async def test_a_lane_that_is_acquired_later_follows_too() -> None:
    async with cluster() as c:
        router = await c.add_router("router-0")
        router.configure(NONE)
        await c.add_verifier()
        await c.add_drafter()
        await c.ready(router, drafters=1)
        assert await num_verified(router, "a") == 0
