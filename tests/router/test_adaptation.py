"""A whole small cluster whose drafter promises too much: lengths follow what really survives."""

from __future__ import annotations

import asyncio

import pytest

from router.node import RouterNode
from tests.router.harness import DRAFTER, ask, cluster, expected_ids, make_request
from verifier_service.profiling import StepProfile

PROFILE = StepProfile(num_tokens=(1, 128), step_s=(10.0, 264.0))
"""8 + 2 B, in seconds that nobody waits for: beside them the time that the loop really takes, the
only one that varies from run to run, is nothing."""
PROMPTS = [(3 + i, 40 + i, 7) for i in range(8)]
NUM_TOKENS = 120


async def _decode_all(router: RouterNode) -> tuple[float, float]:
    """Decode all prompts, check every token.

    Returns:
        Mean draft length, and how many accepted tokens were promised for each one that came true.
    """
    before = router.metrics()
    requests = [make_request(prompt, NUM_TOKENS) for prompt in PROMPTS]
    answers = await asyncio.gather(*(ask(router, request) for request in requests))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.ids == expected_ids(prompt, NUM_TOKENS)
    after = router.metrics()
    names = ("num_verified", "num_verify_rows", "expected_accepted", "num_accepted")
    verified, rows, promised, accepted = (after[name] - before[name] for name in names)
    return verified / rows, promised / accepted


@pytest.mark.parametrize("recalibrate", [True, False])
async def test_lengths_adapt_to_a_drafter_that_promises_too_much(recalibrate: bool) -> None:
    scheduling = {"recalibrate": recalibrate, "gate_drafts": False}
    async with cluster(scheduling=scheduling, explore_fraction=0.01) as c:
        await c.add_verifier(
            profile=PROFILE, delay_s=lambda n: 8.0 + 2.0 * n, sleep=lambda seconds: None
        )
        await c.add_drafter(num_right=1, confidence=0.98)
        router = await c.add_router()
        await c.ready(router, drafters=1)
        for _ in range(2):
            await _decode_all(router)
        length, promise = await _decode_all(router)
        figures = router.metrics()
    second = f"confidence.{DRAFTER}.greedy.2."
    assert figures[second + "reported"] == pytest.approx(0.98)
    assert figures[second + "accepted"] < 0.1
    if recalibrate:
        assert 0.8 < length < 1.6
        assert promise == pytest.approx(1.0, abs=0.15)
        assert figures["num_explored"] > 0
    else:
        assert length > 2.5
        assert promise > 2.0
        assert figures[second + "recalibrated_ece"] == figures[second + "reported_ece"]


async def test_the_gauges_of_verifiers_and_drafters_are_in_the_metrics() -> None:
    async with cluster() as c:
        await c.add_verifier()
        await c.add_drafter()
        router = await c.add_router()
        await c.ready(router, drafters=1)
        figures = router.metrics()
        assert figures["verifier.verifier-0.links_overflowed"] == 0.0
        assert figures["verifier.verifier-0.kv_free_blocks"] > 0
