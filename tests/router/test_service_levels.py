"""A target rate and a tier travel from the request to its lane, and what came of it is reported."""

from __future__ import annotations

import asyncio

import pytest

from cluster.errors import InvalidRequest
from tests.router.harness import ask, cluster, expected_ids, make_request

PROMPTS = [(3 + n, 5, 7) for n in range(6)]


async def test_attainment_is_counted_once_per_request_with_a_target() -> None:
    async with cluster() as c:
        await c.add_verifier()
        await c.add_drafter()
        router = await c.add_router()
        await c.ready(router, drafters=1)
        rates = [0.0, 1e-3, 1e-3, 1e6, 1e6, 1e6]
        answers = await asyncio.gather(
            *(
                ask(router, make_request(prompt, 24, target_rate=rate, ignore_eos=True))
                for prompt, rate in zip(PROMPTS, rates, strict=True)
            )
        )
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer.ids[:5] == expected_ids(prompt, 24)[:5]
        figures = router.metrics()
        assert (figures["slo.num_requests"], figures["slo.num_met"]) == (5, 2)
        assert figures["slo.share_met"] == pytest.approx(0.4)
        assert 0 < figures["slo.ratio_p5"] <= figures["slo.ratio_p50"] < 1


async def test_the_lane_knows_target_tier_and_progress() -> None:
    async with cluster() as c:
        await c.add_verifier(delay_s=lambda num_tokens: 0.02)
        router = await c.add_router()
        await c.ready(router)
        request = make_request((3, 5, 7), 24, target_rate=9.0, tier="interactive", ignore_eos=True)
        stream = router.generate(request)
        for _ in range(3):
            await anext(stream)
        (lane,) = router._lanes.values()
        (held,) = lane.state.requests.values()
        assert (held.target_rate, held.tier) == (9.0, "interactive")
        assert held.progress is lane.tickets[0].progress
        assert held.progress.num_tokens == len(held.ids) - held.num_prompt - 1 >= 2
        assert held.progress.elapsed_s > 0
        await stream.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("wrong", [{"target_rate": -1.0}, {"tier": "gold"}])
async def test_what_cannot_be_honoured_is_refused(wrong: dict[str, object]) -> None:
    async with cluster() as c:
        await c.add_verifier()
        router = await c.add_router()
        await c.ready(router)
        with pytest.raises(InvalidRequest):
            await ask(router, make_request((3, 5), 4, **wrong))
