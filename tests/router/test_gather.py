"""The gather rule by itself: which regime, and whether to go now."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.gather import Crew, Regime, go_at, steady_regime
from router.roster import Latency, Wave

MS = 1e-3


def make_crew(num_drafting: int, latency_s: float, *, num_plain: int = 0) -> Crew:
    return Crew(
        num_drafting=num_drafting,
        num_plain=num_plain,
        tokens_per_row=4.0,
        latency=Latency(latency_s, 0.0),
    )


def line(fixed_s: float, row_s: float) -> Callable[[int], float]:
    return lambda num_rows: fixed_s + row_s * num_rows


def regime(group: int = 4, patience_s: float = 2 * MS) -> Regime:
    return Regime(num_groups=2, group=group, rate=1000.0, patience_s=patience_s)


def wave(expected: float, num_rows: int, *, deviation_s: float = 0.5 * MS) -> Wave:
    return Wave(expected=expected, deviation_s=deviation_s, due=math.inf, num_rows=num_rows)


def decide(num_ready: int, *waves: Wave, now: float = 0.0) -> float:
    return go_at(regime(), num_ready=num_ready, waves=waves, now=now)


def test_one_group_where_a_step_costs_much_by_itself() -> None:
    found = steady_regime(make_crew(32, 7 * MS), line(20 * MS, 0.08 * MS), num_groups=2)
    assert (found.num_groups, found.group) == (1, 32)
    assert found.rate == pytest.approx(32 * 4 / (20 + 32 * 0.08 + 7) * 1000)


def test_two_groups_on_purpose_where_they_hide_drafting() -> None:
    """Compute-bound, 2 T(R/2) < T(R) + D: the case in which the one-step rule lost."""
    found = steady_regime(make_crew(4, 3 * MS), line(1 * MS, 1.6 * MS), num_groups=1)
    assert (found.num_groups, found.group) == (2, 2)
    assert found.rate == pytest.approx(4 * 4 / (2 * (1 + 3.2)) * 1000)


def test_one_group_where_drafting_takes_what_it_computes_from_the_verifier() -> None:
    """As above, but on one device: a second group hides nothing, and makes two steps of one."""
    crew = dataclasses.replace(make_crew(4, 3 * MS), shares_device=True)
    found = steady_regime(crew, line(1 * MS, 1.6 * MS), num_groups=2)
    assert (found.num_groups, found.group) == (1, 4)
    assert found.rate == pytest.approx(4 * 4 / (1 + 6.4 + 3) * 1000)


def test_everybody_for_himself_where_drafting_takes_longest() -> None:
    found = steady_regime(make_crew(4, 40 * MS), line(1 * MS, 1.6 * MS), num_groups=1)
    assert found.group == 1


def test_no_more_groups_than_a_drafter_gets_through() -> None:
    """As above, but all by one drafter that takes one batch after the other: with k groups a cycle
    is k of its batches at least, and one group is best."""
    crew = dataclasses.replace(make_crew(4, 15 * MS), draft_s=lambda num_blocks: 15 * MS)
    found = steady_regime(crew, line(1 * MS, 1.6 * MS), num_groups=4)
    assert (found.num_groups, found.group) == (1, 4)
    assert found.rate == pytest.approx(4 * 4 / (1 + 6.4 + 15) * 1000)


def test_no_waiting_for_drafts_that_nobody_asks_for() -> None:
    found = steady_regime(make_crew(0, 0.0, num_plain=8), line(5 * MS, 1 * MS), num_groups=1)
    assert found.group == 0


def test_plain_rows_make_waiting_dearer() -> None:
    """One group of drafting rows would have the verifier idle though plain rows could go."""
    alone = steady_regime(make_crew(4, 10 * MS), line(12 * MS, 0.1 * MS), num_groups=1)
    beside = steady_regime(
        make_crew(4, 10 * MS, num_plain=32), line(15 * MS, 0.1 * MS), num_groups=1
    )
    assert alone.num_groups == 1
    assert beside.num_groups > 1


def test_a_regime_is_kept_where_another_one_is_about_as_good() -> None:
    """2 T(16) = 42 ms against T(32) + D = 42.3 ms: not worth a change either way."""
    step_s = line(20 * MS, 0.0625 * MS)
    for kept in (1, 2):
        found = steady_regime(make_crew(32, 20.3 * MS), step_s, num_groups=kept)
        assert found.num_groups == kept


@given(
    num_drafting=st.integers(1, 64),
    fixed=st.floats(0.1, 30),
    row=st.floats(0.01, 3),
    latency=st.floats(0.5, 40),
    num_groups=st.integers(1, 4),
)
def test_the_regime_is_nearly_the_best_of_all_group_sizes(
    num_drafting: int, fixed: float, row: float, latency: float, num_groups: int
) -> None:
    step_s = line(fixed * MS, row * MS)

    def cycle_s(group: int) -> float:
        num_full, rest = divmod(num_drafting, group)
        busy_s = num_full * step_s(group) + (step_s(rest) if rest else 0.0)
        return max(busy_s, step_s(group) + latency * MS)

    found = steady_regime(make_crew(num_drafting, latency * MS), step_s, num_groups=num_groups)
    best_s = min(cycle_s(group) for group in range(1, num_drafting + 1))
    # More groups than one must be worth 4%, and a change of regime 5%.
    assert cycle_s(found.group) <= 1.1 * best_s


def test_a_full_group_goes_at_once() -> None:
    assert decide(4, wave(1 * MS, 8)) == 0.0


def test_rows_wait_for_what_is_worth_the_time_and_for_nothing_else() -> None:
    assert decide(1, wave(3 * MS, 2)) > 3 * MS, "4 ms of patience"
    assert decide(1, wave(6 * MS, 2)) == 0.0
    assert decide(1, wave(6 * MS, 2), wave(7 * MS, 2)) > 7 * MS, "8 ms for all four"
    assert decide(1) == 0.0, "nothing comes"


def test_what_is_late_is_waited_for_a_while_and_then_left() -> None:
    late = wave(0.0, 2)
    until = decide(1, late, now=1 * MS)
    assert 1 * MS < until < 10 * MS
    assert decide(1, late, now=until) == until, "no longer"
    assert decide(1, wave(0.0, 1, deviation_s=3 * MS), now=1 * MS) == 1 * MS, "too long a shot"


@given(
    waves=st.lists(st.tuples(st.floats(-20, 20), st.integers(1, 32), st.floats(0, 5)), max_size=4),
    num_ready=st.integers(1, 8),
)
def test_waiting_comes_to_an_end_and_is_not_taken_back(
    waves: list[tuple[float, int, float]], num_ready: int
) -> None:
    """Whoever waits until the time he was told, with nothing new, is told to go."""
    coming = [wave(at * MS, n, deviation_s=d * MS) for at, n, d in waves]
    now = 0.0
    for _ in range(20):
        at = decide(num_ready, *coming, now=now)
        assert at >= now
        if at <= now:
            return
        now = at
    pytest.fail("still waiting")


def test_a_heavy_row_is_waited_for_where_a_light_one_is_not() -> None:
    """One drafting row beside seven plain ones: by turns it is in every other step only."""
    crew = make_crew(2, 4 * MS, num_plain=14)
    light = steady_regime(crew, line(9 * MS, 0.1 * MS), num_groups=1)
    heavy = steady_regime(
        dataclasses.replace(crew, drafting_weight=8.0), line(9 * MS, 0.1 * MS), num_groups=2
    )
    assert (light.num_groups, heavy.num_groups) == (2, 1)
    assert heavy.rate == pytest.approx((2 * 8 * 4 + 14) / (9 + 0.2 + 4) * 1000)
    assert heavy.patience_s > light.patience_s
