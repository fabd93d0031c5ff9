"""The draft gate in a whole small cluster: it is asked, it learns, it can be turned off."""

from __future__ import annotations

import asyncio
import dataclasses

from router.node import RouterNode
from tests.router.harness import DRAFTER, ask, cluster, expected_ids, make_request
from verifier_service.profiling import StepProfile

DEAR = StepProfile(num_tokens=(1, 128), step_s=(1.0, 128.0))
"""A second a token, that nobody waits for: a draft must be nearly sure to be worth it."""
PROMPTS = [(3 + i, 40 + i, 7) for i in range(6)]
NUM_TOKENS = 100


async def _decode_all(router: RouterNode) -> dict[str, float]:
    """Decode all prompts, check every token; what was counted."""
    before = router.metrics()
    requests = [make_request(prompt, NUM_TOKENS) for prompt in PROMPTS]
    answers = await asyncio.gather(*(ask(router, request) for request in requests))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.ids == expected_ids(prompt, NUM_TOKENS)
    after = router.metrics()
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


async def test_drafts_that_cannot_pay_are_not_asked_for_and_turning_it_off_asks_for_all() -> None:
    async with cluster(explore_fraction=0.0) as c:
        await c.add_verifier(profile=DEAR, delay_s=lambda n: 1.0 * n, sleep=lambda seconds: None)
        drafter = await c.add_drafter(num_right=0, confidence=0.3)
        router = await c.add_router()
        await c.ready(router, drafters=1)
        await _decode_all(router)
        gated = await _decode_all(router)
        assert gated["num_draft_asks"] < 0.25 * gated["num_drafts_gated"]
        figures = router.metrics()
        assert figures["gate_gain_of_all.verifier-0"] < 1.01
        assert figures["gate_greedy.accepted.verifier-0"] < 1.0
        router.configure(dataclasses.replace(router.scheduling, gate_drafts=False))
        always = await _decode_all(router)
        assert always["num_drafts_gated"] == 0
        assert always["num_draft_asks"] > 5 * gated["num_draft_asks"]
        router.configure(dataclasses.replace(router.scheduling, policy="none"))
        blocks = drafter.num_blocks
        plain = await _decode_all(router)
        assert plain["num_draft_asks"] == 0
        assert drafter.num_blocks == blocks


async def test_the_router_knows_which_drafters_share_the_verifiers_device() -> None:
    async with cluster() as c:
        await c.add_verifier(device="box")
        await c.add_drafter(device="box")
        router = await c.add_router()
        await c.ready(router, drafters=1)
        (lane,) = router._lanes.values()
        gate = lane.state._gate
        assert gate is not None
        ref = router._book.bind(7, DRAFTER)
        assert ref is not None
        assert ref.device == gate._outlook._device == "box"
