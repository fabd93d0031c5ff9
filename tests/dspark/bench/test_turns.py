"""Settings by turns under one load."""

from __future__ import annotations

import pytest

from cluster.errors import ConfigError, Overloaded
from dspark.async_client import AsyncClient
from dspark.bench.asks import Mix
from dspark.bench.interleaved import Setting, Timing
from dspark.bench.turns import Turns
from tests.dspark.bench.made_samples import make_prompt
from tests.dspark.fake_server import FakeDSpark

SETTINGS = (
    Setting(name="none", scheduling={"policy": "none"}),
    Setting(name="full", scheduling={"policy": "full", "gate_drafts": False}),
    Setting(name="adaptive"),
)
MIX = Mix(prompts=[make_prompt(f"prompt {i}") for i in range(50)])
BASE = {"policy": "adaptive", "gate_drafts": "true"}
TIMING = Timing(settle_s=0.03, measure_s=0.1)


async def test_every_cycle_has_every_setting_and_the_load_never_stops(
    fake: FakeDSpark, address: str
) -> None:
    fake.pause_s = 0.01
    async with AsyncClient(address) as client:
        turns = Turns(client, MIX, BASE, SETTINGS)
        cycles = [
            found async for found in turns.measure(repeat=2, users=2, cycles=4, timing=TIMING)
        ]
    assert [[block["repeat"] for block in found] for found in cycles] == [
        [number] * 3 for number in (8, 9, 10, 11)
    ]
    orders = [tuple(block["setting"] for block in found) for found in cycles]
    assert all(sorted(order) == ["adaptive", "full", "none"] for order in orders)
    assert len(set(orders)) > 1, "in an order of its own"
    seeds = [request.sampling.seed for request in fake.requests]
    assert len(seeds) > 2, "users ask again"
    assert len(set(seeds)) == len(seeds), "and nobody begins anew"
    for found in cycles:
        for block in found:
            assert block["tokens"] > 0
            assert block["measured_s"] == pytest.approx(0.1, abs=0.08)
            assert block["took_s"] >= 0.13
    last = dict(BASE) | dict(
        next(s for s in SETTINGS if s.name == cycles[-1][-1]["setting"]).scheduling
    )
    shown = {key: str(value).lower() for key, value in last.items()}
    assert fake.scheduling == shown, "base and what the setting changes, nothing of another"


async def test_settings_that_ask_otherwise_cannot_take_turns(address: str) -> None:
    async with AsyncClient(address) as client:
        with pytest.raises(ConfigError, match="rejection"):
            Turns(client, MIX, BASE, [Setting(name="rejection", asked={"draft": False})])


async def test_a_server_that_fails_compares_nothing(fake: FakeDSpark, address: str) -> None:
    fake.error = Overloaded("full")
    async with AsyncClient(address) as client:
        turns = Turns(client, MIX, BASE, SETTINGS)
        with pytest.raises(Overloaded):
            async for _ in turns.measure(repeat=0, users=1, cycles=1, timing=TIMING):
                pass
