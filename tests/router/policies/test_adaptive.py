"""`adaptive`: whole blocks below the knee, no cliffs, nothing lost at any load."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from router.policies import PolicyInput, make_policy
from router.policies.adaptive import Adaptive
from router.policies.knee import Knee, cutting_gain
from router.policies.lagged import Lagged
from tests.router.policies.steps import make_step, random_costs

GAMMA = 6


def blocks(rng: np.random.Generator, num_rows: int, mean: float = 0.75) -> np.ndarray:
    """Survival of calibrated blocks: easy and hard requests."""
    confidence = rng.beta(4 * mean, 4 * (1 - mean), (num_rows, GAMMA))
    return confidence.cumprod(axis=1)


def knee_costs(size: int = 1000) -> np.ndarray:
    """Flat up to 64 tokens, then in proportion."""
    return np.maximum(1.0, np.arange(size) / 64)


def yields(step: PolicyInput, lengths: np.ndarray) -> tuple[float, float]:
    """Expected tokens of a step, and its seconds."""
    there = np.arange(step.survival_RG.shape[1]) < lengths[:, None]
    tokens = len(lengths) + float(step.survival_RG[there].sum())
    return tokens, float(step.step_s_B[step.base + int(lengths.sum())])


def run(
    policy: str,
    loads: list[int],
    costs: np.ndarray | None = None,
    *,
    deterministic: bool = True,
    seed: int = 0,
) -> float:
    """Tokens per second over steps of so many requests; the first eighth warms up."""
    rng = np.random.default_rng(seed)
    costs = knee_costs() if costs is None else costs
    made = make_policy(policy)
    tokens = seconds = 0.0
    for n, num_rows in enumerate(loads):
        step = make_step(blocks(rng, num_rows), costs, deterministic=deterministic)
        lengths = made.lengths(step)
        made.remember(step)
        if n >= len(loads) // 8:
            gained, took = yields(step, lengths)
            tokens, seconds = tokens + gained, seconds + took
    return tokens / seconds


@pytest.mark.parametrize("deterministic", [True, False])
def test_below_the_knee_blocks_are_verified_whole(deterministic: bool) -> None:
    rng = np.random.default_rng(0)
    policy = Adaptive(0.02)
    for n in range(50):
        step = make_step(blocks(rng, 6), knee_costs(), deterministic=deterministic)
        lengths = policy.lengths(step)
        policy.remember(step)
        if n > 5:
            assert lengths.tolist() == [GAMMA] * 6


def test_above_the_knee_blocks_are_cut() -> None:
    assert run("adaptive", [64] * 80) > 1.15 * run("full", [64] * 80)
    assert run("adaptive", [64] * 80, deterministic=False) > 1.15 * run("full", [64] * 80)


def test_one_sampled_draft_makes_the_whole_step_lagged() -> None:
    rng = np.random.default_rng(1)
    adaptive, lagged = Adaptive(0.0), Lagged()
    smooth = 80.0 + np.arange(300)
    differs = 0
    for _ in range(50):
        step = make_step(blocks(rng, 40), smooth)
        step.deterministic_R[17] = False
        assert adaptive.lengths(step).tolist() == lagged.lengths(step).tolist()
        free = make_step(step.survival_RG, smooth)
        differs += adaptive.lengths(free).sum() != lagged.lengths(free).sum()
        adaptive.remember(step)
        lagged.remember(step)
    assert differs > 25, "the retrospective rule would have said the same: nothing was tested"


@pytest.mark.parametrize("deterministic", [True, False])
def test_never_below_whole_blocks_or_none_at_any_load_or_cost(deterministic: bool) -> None:
    """Random step times with cliffs: at most the minimum gain is given up, and what a budget of
    rounds before misses."""
    rng = np.random.default_rng(2)
    slack = 0.02 if deterministic else 0.04
    for seed in range(6):
        costs = random_costs(rng, 40 * (GAMMA + 1) + 1)
        for num_rows in (1, 4, 13, 40):
            loads = [num_rows] * (1600 // num_rows if num_rows < 13 else 100)
            of = {
                policy: run(policy, loads, costs, deterministic=deterministic, seed=seed)
                for policy in ("adaptive", "none", "full", "fixed:2")
            }
            assert of["adaptive"] >= (1 - slack) * max(of.values()), (seed, num_rows, of)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("period", [1, 3, 10])
def test_a_load_that_swings_around_the_knee_costs_nothing(period: int, deterministic: bool) -> None:
    """Throughput lies between the two steady values; in fact it is their mean, by time."""
    low, high = 8, 12
    swing = ([low] * period + [high] * period) * (240 // period)
    steady = [
        run("adaptive", [num_rows] * 480, deterministic=deterministic) for num_rows in (low, high)
    ]
    swung = run("adaptive", swing, deterministic=deterministic)
    assert min(steady) * 0.995 <= swung <= max(steady) * 1.005


def test_throughput_has_no_cliff_over_load() -> None:
    """One more request never costs more than the minimum gain."""
    rates = [run("adaptive", [num_rows] * 120) for num_rows in range(2, 40)]
    assert all(after > 0.97 * before for before, after in itertools.pairwise(rates))


def test_hysteresis() -> None:
    """Starts at the minimum gain, ends at half of it."""
    step = make_step(np.full((4, 1), 0.5))

    def gaining(gain: float) -> PolicyInput:
        # Whole blocks: 6 tokens in 6 / 4 seconds more than none costs; best is none at all.
        costs = np.ones(9)
        costs[8] = 1.5 * (1 + gain)
        costs[5:8] = 10.0
        return make_step(np.full((4, 1), 0.5), costs)

    assert cutting_gain(gaining(0.03)) == pytest.approx(0.03)
    knee = Knee(0.02)
    assert knee.cuts(step), "a load never met is cut for"
    for gain, cuts in [(0.0, False), (0.015, False), (0.03, True), (0.015, True), (0.005, False)]:
        for _ in range(100):
            knee.learn(gaining(gain))
        assert knee.cuts(step) is cuts, gain


def test_each_class_of_load_is_learnt_by_itself() -> None:
    knee = Knee(0.02)
    small, large = make_step(np.full((2, 2), 0.9)), make_step(np.full((40, 2), 0.9))
    knee.learn(small)
    assert not knee.cuts(small)
    assert knee.cuts(large)
    beside_prefill = make_step(np.full((2, 2), 0.9), num_fixed_tokens=50)
    assert knee.cuts(beside_prefill)


def test_whether_to_cut_does_not_depend_on_the_blocks_at_hand() -> None:
    rng = np.random.default_rng(3)
    policy = Adaptive(0.02)
    for _ in range(10):
        policy.remember(make_step(blocks(rng, 6), knee_costs(), deterministic=False))
    for survival in (np.zeros((6, GAMMA)), np.ones((6, GAMMA)), blocks(rng, 6)):
        step = make_step(survival, knee_costs(), deterministic=False)
        assert policy.lengths(step).tolist() == [GAMMA] * 6


def test_blocks_that_do_not_fit_whole_are_cut_by_worth() -> None:
    policy = Adaptive(0.02)
    for _ in range(5):
        policy.remember(make_step(np.full((2, 2), 0.9)))
    tight = make_step([[0.3, 0.2], [0.9, 0.8]], np.ones(2 + 2 + 1))
    assert policy.lengths(tight).tolist() == [0, 2]


def test_nothing_learnt_from_steps_without_a_choice() -> None:
    assert cutting_gain(make_step(np.zeros((3, 0)))) is None
    assert cutting_gain(make_step(np.full((2, 2), 0.5), np.ones(4))) is None
