"""Gaps between steps, and the contrast of drafted and plain rounds on a shared device."""

from __future__ import annotations

import math

import numpy as np
import pytest

from router.round_times import Gap, RoundTimes, SharedDevice, StepTimed

PLAIN_AND_DRAFTED = np.array([0.0, 1.0])


def test_the_gap_is_what_drafting_does_not_explain() -> None:
    gap = Gap()
    for n in range(200):
        gap.observe(3e-3 + 20e-3 * (n % 2), 20e-3 * (n % 2))
    assert gap.seconds == pytest.approx(3e-3)
    gap.observe(5.0, 0.0)
    assert gap.seconds < 4e-3, "a pause is no gap"


def follow(device: SharedDevice, drafted: bool, *, slow: float, num: int, level: float) -> float:
    """Rounds that take ``slow`` times as long if drafted, by a profile that follows them."""
    for _ in range(num):
        round_s = slow if drafted else 1.0
        device.observe(share=float(drafted), round_s=round_s, predicted_s=level)
        level += 0.2 * (round_s - level)
    return level


def test_slow_down_is_the_contrast_of_drafted_and_plain_rounds() -> None:
    device, level = SharedDevice(), 1.0
    for _ in range(12):
        level = follow(device, True, slow=1.4, num=40, level=level)
        level = follow(device, False, slow=1.4, num=2, level=level)
    plain, drafted = device.factors(PLAIN_AND_DRAFTED)
    assert drafted / plain == pytest.approx(1.4, rel=0.06)
    assert plain == pytest.approx(1 / 1.4, rel=0.1), "the profile has become that of drafted rounds"
    level = follow(device, True, slow=1.4, num=500, level=level)
    assert math.exp(device.slow_down) == pytest.approx(1.4, rel=0.06), "it is kept"


def test_a_machine_that_slows_down_as_a_whole_is_no_slow_down_by_drafting() -> None:
    device, level = SharedDevice(), 1.0
    for n in range(400):
        speed = 1.0 if n < 200 else 1.5
        device.observe(share=float(n % 3 > 0), round_s=speed, predicted_s=level)
        level += 0.2 * (speed - level)
    assert math.exp(device.slow_down) == pytest.approx(1.0, abs=0.03)


def test_rounds_without_time_say_nothing() -> None:
    device = SharedDevice()
    device.observe(share=1.0, round_s=0.0, predicted_s=1.0)
    device.observe(share=1.0, round_s=1.0, predicted_s=0.0)
    assert device.factors(PLAIN_AND_DRAFTED).tolist() == [1.0, 1.0]


def test_a_load_begins_with_what_is_known_of_another() -> None:
    device = SharedDevice()
    follow(device, False, slow=1.4, num=40, level=1.0)
    for _ in range(12):
        level = follow(device, True, slow=1.4, num=40, level=1.0)
        follow(device, False, slow=1.4, num=4, level=level)
    like = SharedDevice(device)
    assert like.slow_down == device.slow_down > 0.2
    half = like.factors(np.array([0.0, 0.5, 1.0]))
    assert half[1] / half[0] == pytest.approx(half[2] / half[1]), "in proportion to the rows"


def timed(num_rows: int, num_drafted: int, step_s: float) -> StepTimed:
    """A step that was predicted to take 0.1 s."""
    return StepTimed(
        num_rows=num_rows,
        num_drafted=num_drafted,
        asked=frozenset(range(num_drafted)),
        num_accepted=0,
        step_s=step_s,
        predicted_s=0.1,
        plain_s=0.1,
    )


def test_each_load_has_a_contrast_of_its_own_and_a_gap_counts_once() -> None:
    times = RoundTimes()
    for n in range(200):
        drafted = 8 * (n % 2)
        times.gap(3e-3, 0.0)
        step_s = 0.1 * 1.3 ** (n % 2)
        assert times.step(timed(8, drafted, step_s)) == pytest.approx(step_s + 3e-3)
        assert times.step(timed(8, drafted, 9.0)) is None, "no gap: not a round"
        times.gap(3e-3, None)
        assert times.step(timed(2, 2, 9.0)) is None, "nobody knew what to expect"
    assert times.slow_down == pytest.approx(1.3, rel=0.03)
    assert times.rest.seconds == pytest.approx(3e-3)
    assert times.at(64).slow_down == times.at(8).slow_down, "not met yet: as its like"
    times.gap(3e-3, 0.0)
    times.step(timed(64, 0, 0.3))
    assert times.at(64).share != times.at(8).share
