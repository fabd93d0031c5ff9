"""Blocks of settings in one server, and what they come to."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from cluster.errors import Overloaded, Unavailable
from dspark.async_client import AsyncClient
from dspark.bench import interleaved
from dspark.bench.asks import Mix
from dspark.bench.comparison import (
    draw_frontier,
    draw_ratios,
    levelled,
    rates_by_setting,
    ratios_to,
)
from dspark.bench.figures import Figure
from dspark.bench.interleaved import Blocks, Setting, Timing, units
from tests.dspark.bench.made_samples import make_prompt
from tests.dspark.fake_server import FakeDSpark

SETTINGS = (
    Setting(name="none", scheduling={"policy": "none"}, asked={"draft": False}),
    Setting(name="full", scheduling={"policy": "full", "gate_drafts": False}),
)
MIX = Mix(prompts=[make_prompt(f"prompt {i}") for i in range(50)])
BASE = {"policy": "adaptive", "gate_drafts": "true"}
TIMING = Timing(settle_s=0.05, measure_s=0.2)


def test_every_unit_has_every_setting_in_an_order_of_its_own() -> None:
    plan = list(units(SETTINGS, (1, 4, 16), 8, seed=1))
    assert plan == list(units(SETTINGS, (1, 4, 16), 8, seed=1))
    assert Counter((unit.repeat, unit.users) for unit in plan) == {
        (repeat, users): 1 for repeat in range(8) for users in (1, 4, 16)
    }
    assert {unit.order for unit in plan} == {("none", "full"), ("full", "none")}
    assert len({tuple(u.users for u in plan if u.repeat == r) for r in range(8)}) > 1


async def test_a_block_measures_its_setting_and_nothing_of_the_one_before(
    fake: FakeDSpark, address: str
) -> None:
    async with AsyncClient(address) as client:
        blocks = Blocks(client, MIX, BASE)
        fake.pause_s = 0.01
        full = await blocks.measure(SETTINGS[1], repeat=0, users=2, timing=TIMING)
        assert fake.scheduling == {"policy": "full", "gate_drafts": "false"}
        first = [(r.chat.messages[0].content, r.sampling.seed) for r in fake.requests[:2]]
        fake.requests.clear()
        none = await blocks.measure(SETTINGS[0], repeat=0, users=2, timing=TIMING)
        assert fake.scheduling == {"policy": "none", "gate_drafts": "true"}, "the base again"
        assert not any(request.draft for request in fake.requests)
        asked = [(r.chat.messages[0].content, r.sampling.seed) for r in fake.requests[:2]]
        assert sorted(asked) == sorted(first), "the same is asked"
        fake.requests.clear()
        await blocks.measure(SETTINGS[0], repeat=1, users=2, timing=TIMING)
        asked = [(r.chat.messages[0].content, r.sampling.seed) for r in fake.requests[:2]]
        assert sorted(asked) != sorted(first), "a repeat asks anew"
    for block in (full, none):
        assert block["tokens"] > 0
        assert block["measured_s"] == pytest.approx(0.2, abs=0.15)
        assert block["counters"] == {"num_steps": 0.0}


async def test_a_server_that_fails_or_stays_busy_compares_nothing(
    fake: FakeDSpark, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncClient(address) as client:
        blocks = Blocks(client, MIX, BASE)
        fake.error = Overloaded("full")
        with pytest.raises(Overloaded):
            await blocks.measure(SETTINGS[0], repeat=0, users=1, timing=TIMING)
        monkeypatch.setattr(interleaved, "_PATIENCE_S", 0.1)
        fake.metrics["live"] = 3.0
        with pytest.raises(Unavailable, match="idle"):
            await blocks.measure(SETTINGS[0], repeat=0, users=1, timing=TIMING)


def made_block(users: int, setting: str, repeat: int, total: float, **more: Any) -> Figure:
    counters = {"num_verify_rows": 10.0, "num_verified": 25.0, "num_steps": 5.0}
    return {
        "users": users,
        "setting": setting,
        "repeat": repeat,
        "tokens_per_s_total": total,
        "tokens_per_s_user": total / users,
        "measured_s": 5.0,
        "accepted_length": None,
        "counters": counters,
        **more,
    }


BLOCKS = [
    made_block(users, setting, repeat, users * speed * (1 + repeat))
    for users in (1, 4)
    for repeat in range(3)
    for setting, speed in (("none", 10.0), ("full", 12.0), ("half", 11.0))
]


def test_means_and_paired_ratios() -> None:
    rows = {(row["users"], row["setting"]): row for row in rates_by_setting(BLOCKS)}
    assert rows[4, "full"]["tokens_per_s_total"] == pytest.approx(4 * 12 * 2)
    assert rows[4, "full"]["verified_per_round"] == 2.5
    assert rows[4, "full"]["rows_per_step"] == 2.0
    assert rows[4, "full"]["accepted_length"] is None
    for ratio in ratios_to(BLOCKS, "full", ("none",)):
        assert ratio["ratio"] == pytest.approx(1.2)
        assert ratio["lower"] == pytest.approx(1.2), "what drifts from repeat to repeat cancels"


def prompted(setting: str, speed: float, repeat: int, prompts: float, seconds: float) -> Figure:
    """So many seconds at so many tokens/s, but for 2 ms of them that each prompt token takes."""
    total = speed * (seconds - 0.002 * prompts) / seconds
    made = made_block(64, setting, repeat, total, measured_s=seconds)
    return made | {"counters": made["counters"] | {"num_prefill_tokens": prompts}}


def test_prompts_that_chance_brings_are_levelled() -> None:
    random = np.random.default_rng(3)
    blocks = [
        prompted(
            setting,
            speed * drift,
            repeat,
            float(random.integers(200, 800)),
            float(random.uniform(4, 8)),
        )
        for repeat, drift in enumerate(random.uniform(0.8, 1.2, 16))
        for setting, speed in (("none", 200.0), ("ours", 202.0))
    ]
    (ratio,) = ratios_to(blocks, "ours", ("none",))
    assert ratio["ratio"] == pytest.approx(1.01, abs=0.006)
    assert ratio["ratio"] - ratio["lower"] < 0.25 * (ratio["raw_ratio"] - ratio["raw_lower"])
    silent = blocks[0] | {"tokens_per_s_total": 0.0}
    rates = [block["levelled_tokens_per_s"] for block in levelled(blocks)]
    others = [block["levelled_tokens_per_s"] for block in levelled([silent, *blocks[1:]])]
    assert others[0] == 0.0
    assert others[1:] == pytest.approx(rates[1:], rel=0.03), "one without a token tells nothing"


def test_a_setting_that_puts_prompts_off_does_not_gain_by_it() -> None:
    """One that emits as many tokens and computes fewer prompts owes them: its rate is lowered."""
    blocks = [
        prompted(setting, 200.0, repeat, prompts + 100.0 * (-1) ** (repeat + (prompts > 450)), 5.0)
        for repeat in range(8)
        for setting, prompts in (("none", 500.0), ("ours", 400.0))
    ]
    (ratio,) = ratios_to(blocks, "ours", ("none",))
    assert ratio["raw_ratio"] > 1.04
    assert ratio["ratio"] == pytest.approx(1.0, abs=0.01)


def test_few_repeats_do_not_tell_what_a_prompt_takes() -> None:
    blocks = [
        prompted(setting, 200.0, repeat, 100.0 * (repeat + 1), 5.0)
        for repeat in range(7)
        for setting in ("none", "ours")
    ]
    assert [b["levelled_tokens_per_s"] for b in levelled(blocks)] == pytest.approx(
        [b["tokens_per_s_total"] for b in levelled(blocks)]
    )


def test_pairs_of_one_load_are_no_evidence_of_each_other() -> None:
    """Two loads that differ in what they favour, four pairs each that hardly differ."""
    blocks = [
        made_block(1, setting, repeat, total) | {"load": repeat // 4}
        for repeat in range(8)
        for setting, total in (("none", 10.0 + 0.01 * repeat), ("ours", 9.0 + 2.0 * (repeat // 4)))
    ]
    (ratio,) = ratios_to(blocks, "ours", ("none",))
    assert ratio["lower_by_load"] < 0.8 < ratio["lower"]


def test_only_repeats_that_have_both_make_pairs() -> None:
    blocks = [*BLOCKS, made_block(1, "full", 9, 1.0)]
    (ratio,) = ratios_to([b for b in blocks if b["users"] == 1], "full", ("none",))
    assert ratio["pairs"] == 3
    assert ratios_to(BLOCKS, "full", ("absent",)) == []


def test_pictures() -> None:
    order = ("none", "half", "full")
    assert draw_frontier(rates_by_setting(BLOCKS), order, "made").startswith(b"\x89PNG")
    found = ratios_to(BLOCKS, "full", ("none", "half"))
    assert draw_ratios([*found, found[0] | {"lower": None}], "made").startswith(b"\x89PNG")
