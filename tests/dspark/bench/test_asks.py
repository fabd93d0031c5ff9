"""What is asked depends on seed, user and turn alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from cluster.errors import ConfigError, InvalidRequest
from dspark.bench.asks import Mix
from tests.dspark.bench.made_samples import make_prompt

PROMPTS = [make_prompt(f"prompt {i}") for i in range(5)]


def make_mix(**changes: Any) -> Mix:
    values: dict[str, Any] = {"prompts": PROMPTS, "max_tokens": (8, 64), "seed": 3}
    return Mix(**(values | changes))


def test_the_same_user_is_asked_the_same_and_others_are_not() -> None:
    mix, again = make_mix(temperatures=(0.0, 1.0)), make_mix(temperatures=(0.0, 1.0))
    asks = [mix.ask(user, turn) for user in range(8) for turn in range(8)]
    assert asks == [again.ask(user, turn) for user in range(8) for turn in range(8)]
    assert asks != [make_mix(seed=4).ask(user, turn) for user in range(8) for turn in range(8)]
    assert len({ask.seed for ask in asks}) == len(asks)


def test_the_way_of_decoding_changes_nothing_else() -> None:
    """Modes and drafting are compared on equal requests."""
    coupled = make_mix(temperatures=(1.0,)).ask(5, 6)
    other = make_mix(temperatures=(1.0,), modes=("rejection",), draft=False).ask(5, 6)
    assert (other.prompt, other.max_tokens, other.seed) == (
        coupled.prompt, coupled.max_tokens, coupled.seed,
    )  # fmt: skip


def test_mixtures_are_even() -> None:
    mix = make_mix(temperatures=(0.0, 0.7), modes=("coupled", "rejection"))
    asks = [mix.ask(user, 0) for user in range(2000)]
    for name, kinds in (("temperature", 2), ("mode", 2), ("max_tokens", 2), ("prompt", 5)):
        counts = Counter(getattr(ask, name) for ask in asks)
        assert len(counts) == kinds
        assert min(counts.values()) > 0.8 * len(asks) / kinds, name


def test_who_is_met_midway_gets_any_length_up_to_the_whole() -> None:
    mix = make_mix(max_tokens=(10,))
    lengths = Counter(mix.ask(user, 0, midway=True).max_tokens for user in range(1000))
    assert lengths.keys() == set(range(1, 11))
    assert mix.ask(0, 0, midway=True).seed == mix.ask(0, 0).seed


def test_options_hold_a_target_only_if_there_is_one() -> None:
    assert "target_tokens_per_s" not in make_mix().ask(0, 0).options
    options = make_mix(target_tokens_per_s=5.0, tier="batch").ask(0, 0).options
    assert (options["target_tokens_per_s"], options["tier"]) == (5.0, "batch")


def test_options_hold_a_schema_only_if_there_is_one() -> None:
    assert "json_schema" not in make_mix().ask(0, 0).options
    options = make_mix(json_schema="{}", adapter="sql").ask(0, 0).options
    assert (options["json_schema"], options["adapter"]) == ("{}", "sql")


@pytest.mark.parametrize(
    "changes", [{"json_schema": "["}, {"json_schema": "[]"}, {"adapter": "a b"}, {"tier": "gold"}]
)
def test_what_the_server_would_refuse_is_not_asked(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        make_mix(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompts": []},
        {"temperatures": ()},
        {"temperatures": (-1.0,)},
        {"temperatures": (float("nan"),)},
        {"modes": ("guess",)},
        {"max_tokens": (8, 0)},
    ],
)
def test_mistakes_are_found_before_anything_is_sent(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make_mix(**changes)
