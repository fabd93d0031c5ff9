"""The best plan against brute force, and what each term of its cost does."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from router.draft_cost import Drafting
from router.draft_plan import DraftPlan, Round, best_plan
from router.draft_worth import Worth
from router.step_load import StepLoad


class Line:
    """Steps of a fixed time, a time per token and a cliff every so many tokens."""

    def __init__(
        self, fixed_s: float, token_s: float, cliff_s: float = 0.0, width: int = 8
    ) -> None:
        self.fixed_s, self.token_s, self.cliff_s, self.width = fixed_s, token_s, cliff_s, width

    def curve_s(self, base: StepLoad, max_tokens: int) -> Any:
        tokens = np.arange(max_tokens + 1)
        return self.fixed_s + self.token_s * tokens + self.cliff_s * (tokens // self.width)


def plan(
    accepted: Any,
    verified: Any,
    *,
    num_rows: int | None = None,
    latency: Any = None,
    times: Line | None = None,
    least_gain: float = 1.0,
    weight: Any = None,
    **changes: Any,
) -> DraftPlan:
    accepted, verified = np.array(accepted, float), np.array(verified, float)
    num = len(accepted)
    num_rows = num_rows or num
    weights = np.ones(num) if weight is None else np.array(weight, float)
    values: dict[str, Any] = {
        "load": StepLoad(num_rows=num_rows, num_tokens=num_rows),
        "times": times or Line(10.0, 1.0),
        "room": 1000,
        "total_weight": float(weights.sum()) + num_rows - num,
        "gap_s": 0.0,
    }
    return best_plan(
        Worth(accepted, verified),
        np.linspace(0, 0.9, accepted.shape[1]),
        Drafting(np.zeros(num + 1) if latency is None else np.array(latency), np.zeros(num + 1)),
        Round(**(values | changes)),
        weight_C=weights,
        least_gain=least_gain,
    )


@pytest.mark.parametrize("seed", range(60))
def test_at_one_level_it_is_the_best_of_all_subsets(seed: int) -> None:
    random = np.random.default_rng(seed)
    num = int(random.integers(1, 7))
    verified = np.full((num, 1), float(random.integers(1, 4)))
    accepted = verified * random.random((num, 1))
    times = Line(*random.random(3) * (20, 3, 8), width=int(random.integers(2, 9)))
    latency = np.concatenate([[0.0], 4 * random.random() + random.random() * np.arange(num)])

    def rate(chosen: tuple[int, ...]) -> float:
        tokens = num + int(verified[list(chosen)].sum())
        step_s = times.curve_s(StepLoad(num_rows=num, num_tokens=num), tokens)[-1]
        return float((num + accepted[list(chosen)].sum()) / (step_s + latency[len(chosen)]))

    subsets = [s for n in range(num + 1) for s in itertools.combinations(range(num), n)]
    best = max(map(rate, subsets))
    found = plan(accepted, verified, latency=latency, times=times)
    assert rate(tuple(np.flatnonzero(found.chosen))) == pytest.approx(best)
    assert found.gain == pytest.approx(best / rate(()))
    assert found.gains[-1] == pytest.approx(rate(tuple(range(num))) / rate(()))
    assert found.plain_s == pytest.approx(num / rate(()))


def test_the_level_that_a_loaded_step_can_afford() -> None:
    """Whole blocks cost 7 tokens each, the sure drafts of the same blocks 2."""
    accepted, verified = [[3.0, 1.9]] * 4, [[7.0, 2.0]] * 4
    cheap = plan(accepted, verified, times=Line(40.0, 0.1))
    dear = plan(accepted, verified, times=Line(1.0, 1.0))
    assert cheap.accepted == pytest.approx(12.0)
    assert dear.accepted == pytest.approx(7.6)
    assert cheap.chosen.all()
    assert dear.chosen.all()


def test_what_does_not_fit_into_a_step_is_not_planned() -> None:
    found = plan([[3.0]] * 8, [[7.0]] * 8, times=Line(40.0, 0.1), room=30)
    assert found.chosen.sum() == 4


def test_a_lane_starts_only_for_the_least_gain() -> None:
    accepted, verified, times = [[0.5]] * 4, [[1.0]] * 4, Line(10.0, 1.0)
    gain = plan(accepted, verified, times=times).gain
    assert 1.0 < gain < 1.2
    assert plan(accepted, verified, times=times, least_gain=gain * 0.999).chosen.all()
    assert not plan(accepted, verified, times=times, least_gain=gain * 1.001).chosen.any()


def test_price_gap_and_slow_down_make_drafting_dearer() -> None:
    def gain(**changes: Any) -> float:
        return plan([[2.0]] * 4, [[3.0]] * 4, times=Line(20.0, 0.5), **changes).gains[-1]

    assert gain(slow_down=lambda shares: 1.5**shares) == pytest.approx(gain() / 1.5)
    assert gain(slow_down=lambda shares: 0.8 ** (1 - shares)) == pytest.approx(gain() * 0.8)
    assert gain(latency=[0, 5, 5, 5, 5]) < gain()
    assert gain(gap_s=10.0) > gain(), "a gap that comes with every round favours longer ones"


def test_heavy_requests_go_first() -> None:
    """Two equal requests, and room for the drafts of one."""
    for heavy in (0, 1):
        weight = [4.0 if r == heavy else 1.0 for r in range(2)]
        found = plan([[1.5]] * 2, [[3.0]] * 2, times=Line(20.0, 0.5), weight=weight, room=3)
        assert found.chosen.tolist() == [heavy == 0, heavy == 1]


def test_groups_by_turns_hide_a_long_drafting_time() -> None:
    """Compute-bound: two half steps take what a whole one does."""
    options: dict[str, Any] = {"latency": [0.0, 20.0, 20.0, 20.0, 20.0], "times": Line(0.5, 5.0)}
    alone = plan([[2.5]] * 4, [[3.0]] * 4, **options)
    by_turns = plan([[2.5]] * 4, [[3.0]] * 4, takes_turns=True, **options)
    step_s = 0.5 + 5.0 * 8
    assert alone.gains[-1] < 1.0
    assert by_turns.gains[-1] == pytest.approx((14 / (2 * step_s)) / (4 / 20.5))


@pytest.mark.parametrize("heavy", [1.0, 4.0])
def test_by_turns_a_row_that_is_asked_goes_without_the_other_step(heavy: float) -> None:
    """One of four rows is drafted for: plain rows are in both steps, it is in one, with more."""
    options: dict[str, Any] = {"latency": [0.0] + [20.0] * 4, "times": Line(10.0, 0.5)}
    worth = [[1.5], [0.0], [0.0], [0.0]], [[2.0], [0.0], [0.0], [0.0]]
    weight = [heavy, 1.0, 1.0, 1.0]
    found = plan(*worth, takes_turns=True, weight=weight, **options)
    total = heavy + 3
    half, whole = 10 + 0.5 * (4 - 0.5 + 1), 10 + 0.5 * (4 - 0.5 + 1)
    assert half == whole, "with a line the step is the same either way"
    by_turns = (2 * total - heavy + heavy * 1.5) / (half + max(half, 20.0))
    one_group = (total + heavy * 1.5) / (10 + 0.5 * 6 + 20.0)
    assert found.gains[1] == pytest.approx(max(by_turns, one_group) / (total / 12.0))
