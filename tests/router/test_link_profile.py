"""The profile of a drafter link: draft time by batch size, round trip, and the learnt deadline."""

from __future__ import annotations

import numpy as np
import pytest

from router.link_profile import LinkProfile

FIXED_S, PER_BLOCK_S, ROUND_TRIP_S = 0.004, 0.0005, 0.003


def play(
    link: LinkProfile,
    num_batches: int,
    *,
    factor: float = 1.0,
    noise: float = 0.0,
    sizes: tuple[int, ...] = (1, 4, 8, 16),
    seed: int = 0,
) -> None:
    """Batches of a drafter that is ``factor`` times as slow as usual."""
    rng = np.random.default_rng(seed)
    for i in range(num_batches):
        size = sizes[i % len(sizes)]
        draft_s = factor * (FIXED_S + PER_BLOCK_S * size) * rng.lognormal(0.0, noise)
        link.observe(size, draft_s, draft_s + ROUND_TRIP_S * rng.lognormal(0.0, noise))


def test_unknown_links_are_as_slow_as_the_bound() -> None:
    link = LinkProfile(bound_s=2.0)
    assert link.wait_s() == link.round_trip_s == link.latency_s(5) == 2.0
    assert link.draft_s(5) == 0.0
    assert link.num_samples == 0


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_draft_time_and_round_trip_are_told_apart(noise: float) -> None:
    link = LinkProfile(bound_s=2.0)
    play(link, 200, noise=noise)
    tolerance = 1e-6 if noise == 0 else 0.1
    for size in (1, 4, 16):
        expected_s = FIXED_S + PER_BLOCK_S * size
        assert link.draft_s(size) == pytest.approx(expected_s, rel=max(tolerance, 0.01))
        assert link.latency_s(size) == pytest.approx(expected_s + ROUND_TRIP_S, rel=0.1)
    assert link.round_trip_s == pytest.approx(ROUND_TRIP_S, rel=max(2 * tolerance, 0.01))


def test_one_size_tells_no_slope_and_many_blocks_are_not_free() -> None:
    link = LinkProfile(bound_s=2.0)
    play(link, 50, sizes=(4,))
    assert link.draft_s(4) == pytest.approx(FIXED_S + 4 * PER_BLOCK_S)
    assert link.draft_s(1) == link.draft_s(4)
    assert link.draft_s(0) == 0.0
    play(link, 100)
    assert link.draft_s(64) > 2 * link.draft_s(4)


def test_a_freak_batch_hardly_counts_and_a_lasting_change_is_followed() -> None:
    link = LinkProfile(bound_s=60.0)
    play(link, 100, noise=0.05)
    before_s = link.latency_s(8)
    link.observe(8, 30.0, 30.0)
    assert link.latency_s(8) < 1.3 * before_s
    play(link, 60, noise=0.05)
    assert link.latency_s(8) == pytest.approx(before_s, rel=0.1)
    play(link, 120, factor=3.0, noise=0.05)
    assert link.draft_s(8) == pytest.approx(3 * (FIXED_S + 8 * PER_BLOCK_S), rel=0.15)
    play(link, 120, noise=0.05)
    assert link.draft_s(8) == pytest.approx(FIXED_S + 8 * PER_BLOCK_S, rel=0.15)


def test_the_deadline_follows_the_latency() -> None:
    link = LinkProfile(bound_s=2.0)
    for _ in range(50):
        link.observe(1, 0.05, 0.1)
    assert 0.1 < link.wait_s() < 0.3
    for _ in range(50):
        link.observe(1, 0.05, 0.5)
    assert 0.5 < link.wait_s() < 1.5
    play(link, 200)
    assert link.wait_s(64) > link.wait_s(), "a large batch takes longer"


def test_nobody_waits_for_a_drafter_that_cannot_make_it() -> None:
    link = LinkProfile(bound_s=0.1)
    for _ in range(10):
        link.observe(1, 0.0, 0.5)
    assert link.wait_s() == 0
    for _ in range(100):
        link.observe(1, 0.0, 0.01)
    assert link.wait_s() > 0.01


def test_silence_ends_the_waiting_until_a_block_comes() -> None:
    link = LinkProfile(bound_s=1.0)
    link.observe(1, 0.05, 0.1)
    for asked in (1.0, 2.0, 3.0):
        assert link.wait_s() > 0
        link.miss(asked)
    assert link.wait_s() == 0
    link.observe(1, 0.05, 0.1)
    assert link.wait_s() > 0.1


def test_a_drafter_ahead_of_the_result_has_no_negative_times() -> None:
    link = LinkProfile(bound_s=1.0)
    for _ in range(50):
        link.observe(2, 0.02, 0.0)
    assert link.round_trip_s == 0.0
    assert link.latency_s(2) == 0.0
    for _ in range(50):
        link.observe(2, 0.02, 0.03)
    assert link.latency_s(2) == pytest.approx(0.03, rel=0.05)


def test_the_same_blocks_give_the_same_profile() -> None:
    first, second = LinkProfile(bound_s=1.0), LinkProfile(bound_s=1.0)
    for link in (first, second):
        play(link, 80, noise=0.2, seed=3)
    assert first.snapshot() == second.snapshot()
    assert first.snapshot()["num_samples"] == 80


def test_a_batch_of_quite_another_size_is_believed_at_once() -> None:
    """When many requests become one, one block's time must not be taken for a freak."""
    link = LinkProfile(bound_s=5.0)
    for _ in range(100):
        link.observe(64, 0.33, 0.33)
    link.observe(1, 0.017, 0.017)
    link.observe(1, 0.017, 0.017)
    assert link.draft_s(1) == pytest.approx(0.017, rel=0.1)
    assert link.draft_s(64) == pytest.approx(0.33, rel=0.1)


def test_a_drafter_that_had_to_catch_up_says_that_it_is_there_and_not_how_long_it_takes() -> None:
    link = LinkProfile(bound_s=2.0)
    link.observe(4, 0.5, 0.6, usual=False)
    assert link.latency_s(4) == pytest.approx(0.6), "nothing else is known"
    link = LinkProfile(bound_s=2.0)
    play(link, 100, sizes=(4,))
    before = link.latency_s(4)
    for asked in (1.0, 2.0, 3.0):
        link.miss(asked)
    assert link.wait_s() == 0.0
    link.observe(4, 0.5, 0.6, usual=False)
    assert link.latency_s(4) == before == pytest.approx(FIXED_S + 4 * PER_BLOCK_S + ROUND_TRIP_S)
    assert link.wait_s() > before


def test_a_larger_batch_than_any_so_far_is_waited_for_in_proportion() -> None:
    """While all batches were of one size nobody knows that more take longer: to wait costs little,
    to give up all of them costs the round its drafts."""
    link = LinkProfile(10.0)
    for _ in range(50):
        link.observe(1, 0.02, 0.03)
    assert link.latency_s(40) == pytest.approx(0.03), "it is hoped that they do not"
    assert link.wait_s(40) > 40 * 0.02
    assert link.wait_s(1) < 0.1


def test_blocks_that_say_the_same_are_taken_in_as_one_by_one() -> None:
    """To the last bit: what a lane does must not depend on how its frames are cut."""
    together, single = LinkProfile(bound_s=5.0), LinkProfile(bound_s=5.0)
    rng = np.random.default_rng(3)
    for round_ in range(40):
        num, draft_s = int(rng.integers(1, 40)), float(rng.lognormal(-5, 0.5))
        facts = num, draft_s, draft_s + 0.002
        kwargs = {"weight": 1 / num, "usual": round_ % 7 != 3}
        together.observe(*facts, **kwargs, times=num)
        for _ in range(num):
            single.observe(*facts, **kwargs)
        assert together.snapshot() == single.snapshot()
        assert together.latency_s(9) == single.latency_s(9)


def test_how_long_to_wait_follows_whatever_is_learnt() -> None:
    link = LinkProfile(bound_s=5.0)
    assert link.wait_s(4) == 5.0
    link.observe(4, 0.05, 0.1)
    first = link.wait_s(4)
    assert first < 5.0
    assert link.wait_s(400) > first, "another question has another answer"
    for _ in range(30):
        link.observe(4, 0.5, 1.0)
    assert link.wait_s(4) > first
    for asked in (1.0, 2.0, 3.0):
        link.miss(asked)
    assert link.wait_s(4) == 0.0


def test_what_larger_batches_take_is_not_forgotten_while_there_are_none() -> None:
    link = LinkProfile(10.0)
    for n in (1, 64) * 30:
        link.observe(n, 0.01 + 0.005 * n, 0.02 + 0.005 * n, weight=1 / n)
    known = link.draft_s(64)
    assert known == pytest.approx(0.33, rel=0.1)
    for _ in range(3000):
        link.observe(1, 0.015, 0.025)
    assert link.draft_s(64) == pytest.approx(known, rel=0.05)
    assert link.hopeful_draft_s(np.array([64.0]))[0] == pytest.approx(known, rel=0.05)
    assert link.draft_s(1) == pytest.approx(0.015, rel=0.02)
