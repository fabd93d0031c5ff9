"""Scheduling as texts: there and back, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest

from cluster.config import SchedulingConfig
from cluster.errors import ConfigError
from cluster.scheduling_text import scheduling_text, with_values

ODD = SchedulingConfig(policy="fixed:3", min_gain=1 / 3, gate_drafts=False, draft_price=1e-7)


@pytest.mark.parametrize("scheduling", [SchedulingConfig(), ODD])
def test_texts_read_back_exactly(scheduling: SchedulingConfig) -> None:
    texts = scheduling_text(scheduling)
    assert texts.keys() == {field.name for field in dataclasses.fields(SchedulingConfig)}
    assert with_values(ODD, texts) == scheduling
    assert with_values(SchedulingConfig(), texts) == scheduling


def test_what_is_not_named_stays() -> None:
    changed = with_values(ODD, {"policy": "none", "late_dispatch": "false", "min_gain": "0"})
    assert changed == dataclasses.replace(ODD, policy="none", late_dispatch=False, min_gain=0.0)
    assert with_values(ODD, {}) == ODD


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"colour": "red"}, "router.scheduling.colour: unknown key"),
        ({"gate_drafts": "no"}, "router.scheduling.gate_drafts: 'no'"),
        ({"min_gain": "much"}, "router.scheduling.min_gain: 'much'"),
        ({"min_gain": "nan"}, "router.scheduling.min_gain"),
        ({"min_gain": "1.5"}, "router.scheduling.min_gain"),
        ({"gather": "later"}, "router.scheduling.gather: 'later'"),
        ({"policy": "perfect"}, "router.scheduling.policy"),
        ({"policy": "fixed:-1"}, "router.scheduling.policy"),
    ],
)
def test_mistakes_name_the_key(values: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_values(SchedulingConfig(), values)
    assert named in caught.value.message
