"""`fixed`, `threshold`, `full`, `none`, and names that are none."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.config import load_config
from cluster.errors import ConfigError
from cluster.policy_text import PLAIN_POLICIES
from router.policies import make_policy
from router.policies.walk import level
from tests.router.policies.steps import make_step, random_step

CONFIDENCE = [[0.9, 0.8, 0.5], [0.5, 1.0, 0.2], [0.0, 0.0, 0.0], [0.99, 0.0, 0.0]]
BLOCKS = np.cumprod(CONFIDENCE, axis=1)
"""The last row has one draft."""
WIDTHS = [3, 3, 3, 1]


@pytest.mark.parametrize(
    ("policy", "lengths"),
    [
        ("none", [0, 0, 0, 0]),
        ("fixed:0", [0, 0, 0, 0]),
        ("fixed:2", [2, 2, 2, 1]),
        ("full", [3, 3, 3, 1]),
        ("threshold:0", [3, 3, 3, 1]),
        ("threshold:0.5", [3, 2, 0, 1]),
        ("threshold:0.8", [2, 0, 0, 1]),
        ("threshold:1", [0, 0, 0, 0]),
    ],
)
def test_lengths(policy: str, lengths: list[int]) -> None:
    made = make_policy(policy)
    step = make_step(BLOCKS, num_drafts=WIDTHS)
    assert made.name == policy
    assert made.lengths(step).tolist() == lengths
    made.remember(step)
    assert made.lengths(step).tolist() == lengths


def test_costs_play_no_part() -> None:
    steep = make_step(BLOCKS, np.arange(1, 20) ** 3, num_drafts=WIDTHS)
    assert make_policy("fixed:2").lengths(steep).tolist() == [2, 2, 2, 1]


def test_room_is_shared_out_place_by_place_lower_rows_first() -> None:
    for room, lengths in [(2, [1, 1, 0, 0]), (5, [2, 1, 1, 1]), (9, [3, 3, 2, 1])]:
        step = make_step(BLOCKS, np.ones(4 + room + 1), num_drafts=WIDTHS)
        assert make_policy("full").lengths(step).tolist() == lengths


def test_level_equals_dealing_out_one_draft_at_a_time() -> None:
    rng = np.random.default_rng(0)
    for _ in range(500):
        limit = rng.integers(0, 6, rng.integers(1, 8))
        room = int(rng.integers(0, limit.sum() + 3))
        dealt = np.zeros_like(limit)
        for place in range(6):
            for r in range(len(limit)):
                if limit[r] > place and dealt.sum() < room:
                    dealt[r] += 1
        assert level(limit, room).tolist() == dealt.tolist()


def test_a_confidence_of_just_the_threshold_passes() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        least = float(np.round(rng.random(), 3))
        confidence = rng.uniform(least, 1.0, (3, 4))
        confidence[rng.random((3, 4)) < 0.5] = least
        step = make_step(confidence.cumprod(axis=1))
        assert make_policy(f"threshold:{least}").lengths(step).tolist() == [4, 4, 4]


def test_which_policies_weigh() -> None:
    weighs = {
        text: make_policy(text).weighs for text in (*PLAIN_POLICIES, "fixed:3", "threshold:1")
    }
    assert {text for text, weigh in weighs.items() if not weigh} == {"full", "none", "fixed:3"}


@pytest.mark.parametrize(
    "text",
    [
        *("", "Full", "full:3", "fixed", "fixed:", "fixed:-1", "fixed:2.5", "fixed:65", "fixed:²"),
        *("threshold", "threshold:1.1", "threshold:nan", "threshold:1e-1", "adaptive ", "none:0"),
    ],
)
def test_other_names_are_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(ConfigError, match=r"adaptive, causal.*fixed:K.*threshold:C"):
        make_policy(text)
    with pytest.raises(ConfigError, match=r"^router\.scheduling\.policy: "):
        load_config({"router": {"scheduling": {"policy": text}}})


def test_every_policy_of_the_configuration_can_be_made() -> None:
    for text in (*PLAIN_POLICIES, "fixed:64", "threshold:0.05"):
        config = load_config({"router": {"scheduling": {"policy": text}}})
        assert make_policy(config.router.scheduling.policy).name == text


def test_an_empty_step() -> None:
    rng = np.random.default_rng(2)
    for policy in ("threshold:0.4", "fixed:3", "full"):
        for _ in range(200):
            step = random_step(rng)
            lengths = make_policy(policy).lengths(step)
            assert (lengths <= step.num_drafts_R).all()
            assert lengths.sum() <= step.room
