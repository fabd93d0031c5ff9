"""`causal`, `retrospective` and `lagged` against their definitions, spelt out draft by draft."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.errors import Unsupported
from router.policies import PolicyInput, make_policy
from router.policies.causal import causal_lengths
from router.policies.lagged import Lagged
from router.policies.retrospective import retrospective_lengths
from tests.router.policies.steps import make_step, random_step, walk_of


def papers_loop(step: PolicyInput) -> list[int]:
    """Algorithm 1, line by line, with weights and tokens decided already."""
    tokens, tau = step.base, float(step.weight_R.sum())
    lengths = [0] * len(step.rids)
    best = tau / step.step_s_B[tokens]
    for negative, r, j in walk_of(step):
        if tokens + 1 >= len(step.step_s_B):
            break
        tokens, tau = tokens + 1, tau - negative
        if not tau / step.step_s_B[tokens] > best:
            break
        best, lengths[r] = tau / step.step_s_B[tokens], j + 1
    return lengths


def rate(step: PolicyInput, gains: np.ndarray, lengths: np.ndarray) -> float:
    """The objective: expected weighted tokens per second."""
    there = np.arange(gains.shape[1]) < lengths[:, None]
    tokens = step.weight_R.sum() + gains[there].sum()
    return float(tokens / step.step_s_B[step.base + int(lengths.sum())])


def all_schedules(step: PolicyInput) -> list[np.ndarray]:
    """Every combination of prefixes that fits."""
    grid = np.stack(
        np.meshgrid(*[np.arange(n + 1) for n in step.num_drafts_R], indexing="ij"), axis=-1
    ).reshape(-1, len(step.rids))
    return [lengths for lengths in grid if lengths.sum() <= step.room]


def test_causal_equals_the_papers_loop() -> None:
    rng = np.random.default_rng(1)
    seen = set()
    for _ in range(10_000):
        step = random_step(rng)
        lengths = causal_lengths(step)
        assert lengths.tolist() == papers_loop(step)
        assert lengths.dtype == np.int32
        seen.add(int(lengths.sum()))
    assert len(seen) > 10, "hardly anything was admitted: nothing was tested"


@pytest.mark.parametrize(
    "policy", ["causal", "lagged", "retrospective", "adaptive", "threshold:0.5"]
)
def test_lengths_are_prefixes_in_hand_that_fit(policy: str) -> None:
    rng = np.random.default_rng(2)
    for _ in range(300):
        made = make_policy(policy)
        for _ in range(4):
            step = random_step(rng)
            lengths = made.lengths(step)
            made.remember(step)
            assert lengths.shape == step.num_drafts_R.shape
            assert (lengths >= 0).all()
            assert (lengths <= step.num_drafts_R).all()
            assert lengths.sum() <= step.room


@pytest.mark.parametrize("policy", ["causal", "retrospective", "lagged"])
def test_what_is_chosen_is_a_start_of_the_walk(policy: str) -> None:
    """No draft left out is worth more than one that is verified, weights counted."""
    rng = np.random.default_rng(3)
    for _ in range(500):
        step = random_step(rng)
        lengths = make_policy(policy).lengths(step)
        num = int(lengths.sum())
        wanted = np.zeros_like(lengths)
        for _, r, j in walk_of(step)[:num]:
            wanted[r] = j + 1
        assert lengths.tolist() == wanted.tolist()


def test_retrospective_finds_the_global_optimum() -> None:
    rng = np.random.default_rng(4)
    better = 0
    for _ in range(1500):
        step = random_step(rng)
        if not len(step.rids) or np.prod(step.num_drafts_R + 1) > 600:
            continue
        gains = step.survival_RG * step.weight_R[:, None]
        best = max(rate(step, gains, lengths) for lengths in all_schedules(step))
        assert rate(step, gains, retrospective_lengths(step)) == pytest.approx(best, rel=1e-6)
        better += rate(step, gains, causal_lengths(step)) < best * (1 - 1e-9)
    assert better > 10, "no cliff ever stopped the early stop: nothing was tested"


def test_lagged_finds_the_global_optimum_of_the_rounds_two_before() -> None:
    """The budget is the best over all schedules, valued by what the requests' blocks of two steps
    before survived with; of this step's blocks it says nothing."""
    rng = np.random.default_rng(5)
    sizes = set()
    for _ in range(400):
        step = random_step(rng, deterministic=False)
        if not len(step.rids) or np.prod(step.num_drafts_R + 1) > 600:
            continue
        old = np.sort(rng.random(step.survival_RG.shape), axis=1)[:, ::-1]
        gamma = step.survival_RG.shape[1]
        before = make_step(old, num_drafts=[gamma] * len(old), rids=step.rids)
        policy = Lagged()
        policy.remember(before)
        policy.remember(make_step(np.full_like(old, 0.01), rids=step.rids))
        budget = int(policy.predicted(step).argmax())
        there = np.arange(gamma) < step.num_drafts_R[:, None]
        gains = np.where(there, old, 0.0) * step.weight_R[:, None]
        per_size: dict[int, float] = {}
        for lengths in all_schedules(step):
            size = int(lengths.sum())
            per_size[size] = max(per_size.get(size, 0.0), rate(step, gains, lengths))
        assert per_size[budget] == pytest.approx(max(per_size.values()), rel=1e-6)
        live = step.survival_RG * step.weight_R[:, None]
        assert policy.lengths(step).sum() == min(budget, np.count_nonzero(live))
        sizes.add(budget)
    assert len(sizes) > 5


def test_the_budget_of_lagged_does_not_read_the_step() -> None:
    rng = np.random.default_rng(6)
    for _ in range(200):
        step = random_step(rng, deterministic=False)
        other = np.sort(rng.random(step.survival_RG.shape), axis=1)[:, ::-1]
        other = np.where(np.arange(other.shape[1]) < step.num_drafts_R[:, None], other, 0.0)
        same = make_step(
            other,
            step.step_s_B,
            num_fixed_tokens=step.num_fixed_tokens,
            num_drafts=step.num_drafts_R,
            deterministic=False,
            weight=step.weight_R,
            rids=step.rids,
        )
        policy = Lagged()
        for _ in range(2):
            policy.remember(make_step(rng.choice([0.2, 0.7], (6, 1)), rids=np.arange(6) * 10))
        assert policy.predicted(step).tolist() == policy.predicted(same).tolist()


def test_the_step_just_before_is_not_looked_at() -> None:
    costs = [1, 1, 1.5, 2.5]
    steep = make_step([[0.9, 0.9]], costs, deterministic=False)
    policy = Lagged()
    for survival in ([[0.9, 0.8]], [[0.1, 0.1]]):
        policy.remember(make_step(survival))
    assert policy.predicted(steep).argmax() == 1  # 1.9 / 1.5 beats 1 / 1, and 2.7 / 2.5
    policy.remember(make_step([[0.9, 0.8]]))
    assert policy.predicted(steep).argmax() == 0


def test_a_sampled_draft_is_refused_by_the_retrospective_rule() -> None:
    step = make_step([[0.9], [0.9]])
    step.deterministic_R[1] = False
    with pytest.raises(Unsupported, match="biased by 1 blocks"):
        retrospective_lengths(step)
    with pytest.raises(Unsupported):
        make_policy("retrospective").lengths(step)


def test_causal_never_looks_past_the_stop() -> None:
    """Values behind the first draft that does not pay change nothing, however good."""
    for second in (0.0, 0.72, 0.8):
        step = make_step([[0.8, second]], [9, 1, 2, 1 / 0.45])
        assert causal_lengths(step).tolist() == [0]
    assert retrospective_lengths(make_step([[0.8, 0.72]], [9, 1, 2, 1 / 0.45])).tolist() == [2]


def test_free_tokens_are_all_taken_and_hopeless_ones_are_not() -> None:
    for lengths in (causal_lengths, retrospective_lengths):
        assert lengths(make_step([[0.9, 0.1], [0.2, 0.0]])).tolist() == [2, 1]


def test_ties_go_to_the_lower_row_then_place() -> None:
    costs = [1, 1, 1, 1, 1, 10, 10]
    for lengths in (causal_lengths, retrospective_lengths):
        assert lengths(make_step(np.full((2, 2), 0.5), costs)).tolist() == [2, 0]


def test_a_weight_goes_before_a_better_draft_of_others() -> None:
    costs = [1, 1, 1, 1, 10, 10, 10]
    survival = [[0.9, 0.8], [0.5, 0.4]]
    assert causal_lengths(make_step(survival, costs)).tolist() == [1, 0]
    assert causal_lengths(make_step(survival, costs, weight=[1, 4])).tolist() == [0, 1]


@pytest.mark.parametrize("policy", ["causal", "lagged", "retrospective", "adaptive", "full"])
def test_nothing_to_schedule(policy: str) -> None:
    made = make_policy(policy)
    for step in (make_step(np.zeros((3, 0))), make_step(np.zeros((0, 5)))):
        assert made.lengths(step).tolist() == [0] * len(step.rids)
        made.remember(step)
    cramped = make_step([[0.9, 0.9]], [1, 1])
    assert made.lengths(cramped).tolist() == [0]
