"""When steps go, over the real lane on a virtual clock (`tests.router.lane_world`).

The whole grid, with longer runs and a bound of 3%, is `benchmarks/simulated_dispatch.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cluster.config import SchedulingConfig
from tests.frames import make_sampling
from tests.router.lane_world import LaneWorld, Setting, throughput

CURVES: dict[str, Callable[[int], float]] = {
    "memory": lambda n: (20 + 0.01 * n) / 1000,
    "mixed": lambda n: (10 + 0.1 * n) / 1000,
    "compute": lambda n: (1 + 0.2 * n) / 1000,
}
ALWAYS = {"policy": "full", "gate_drafts": False}


def make_setting(curve: str, num_requests: int, draft_ms: float, **changes: Any) -> Setting:
    values: dict[str, Any] = {
        "step_s": CURVES[curve],
        "num_requests": num_requests,
        "draft_s": draft_ms / 1000,
    }
    return Setting(**(values | changes))


def rate(
    setting: Setting, gather: str, *, late_dispatch: bool = True, num_cycles: int = 60
) -> float:
    scheduling = SchedulingConfig(**ALWAYS, gather=gather, late_dispatch=late_dispatch)
    return throughput(setting, scheduling, num_cycles=num_cycles)


@pytest.mark.parametrize(
    ("curve", "num_requests", "draft_ms"),
    [*itertools.product(CURVES, (4, 24), (2, 15)), ("memory", 32, 6), ("compute", 4, 6)],
)
def test_never_much_worse_than_the_better_of_the_simple_rules(
    curve: str, num_requests: int, draft_ms: float
) -> None:
    setting = make_setting(curve, num_requests, draft_ms)
    when_free = rate(setting, "when_free", late_dispatch=False)
    wait_for_all = rate(setting, "wait_for_all", late_dispatch=False)
    steady = rate(setting, "steady")
    assert steady >= 0.95 * max(when_free, wait_for_all)
    cycle_s = setting.step_s(8 * num_requests) + (draft_ms + 1) / 1000
    if 2 * setting.step_s(4 * num_requests) / cycle_s >= 1.45:
        assert steady >= 1.3 * when_free


@pytest.mark.parametrize(
    ("curve", "num_requests", "draft_ms"), [("compute", 4, 6), ("mixed", 24, 15)]
)
def test_groups_are_formed_on_purpose(curve: str, num_requests: int, draft_ms: float) -> None:
    """The blocks of a step come in one frame, and everybody starts at once: by themselves they
    would stay together."""
    setting = make_setting(curve, num_requests, draft_ms, stagger_s=0.0)
    steady = rate(setting, "steady")
    assert steady >= 1.15 * rate(setting, "wait_for_all")
    assert steady >= 0.97 * rate(setting, "when_free")


def test_low_acceptance_changes_nothing_about_that() -> None:
    setting = make_setting("memory", 16, 2, gamma=5, survival=0.45)
    assert rate(setting, "steady") >= 1.3 * rate(setting, "when_free", late_dispatch=False)


def test_late_dispatch_hides_the_way_to_the_verifier() -> None:
    setting = make_setting("compute", 4, 2)
    late, not_late = (rate(setting, "steady", late_dispatch=late) for late in (True, False))
    assert late > 1.05 * not_late


def test_plain_requests_beside_drafting_ones_keep_the_verifier_busy() -> None:
    setting = make_setting("memory", 24, 15, share_plain=0.8, num_new_tokens=(9999, 9999))
    assert rate(setting, "steady") >= 0.95 * max(
        rate(setting, "when_free"), rate(setting, "wait_for_all")
    )


def test_queued_steps_leave_no_time_between_steps() -> None:
    """Two groups that hide drafting: the exposed time that the profile learns goes to nothing."""
    world = LaneWorld(make_setting("compute", 16, 2), SchedulingConfig(**ALWAYS))
    world.run(10.0)
    assert world.counters.num_queued_steps > 0.8 * len(world.steps)
    assert world.state.profile.overhead_s < 0.1e-3
    late_off = LaneWorld(make_setting("memory", 16, 2), SchedulingConfig(**ALWAYS))
    late_off.run(10.0)
    assert late_off.state.profile.overhead_s == pytest.approx(3.3e-3, rel=0.4), "one group: all"


@pytest.mark.parametrize("gather", ["steady", "when_free", "wait_for_all"])
def test_what_drafts_hold_moves_no_step(gather: str) -> None:
    """Confidences of the blocks in hand may decide how much is verified, never who goes when."""

    def trace(shuffle: bool) -> list[tuple[float, int, int]]:
        world = LaneWorld(
            make_setting(
                "mixed",
                12,
                6,
                sampling=make_sampling(temperature=1.0, mode="rejection"),
                num_new_tokens=(50, 90),
            ),
            SchedulingConfig(**ALWAYS, gather=gather),
        )
        if shuffle:
            rng = np.random.default_rng(7)
            world.confidence = lambda: rng.uniform(0.05, 1.0, world.setting.gamma)
        world.run(3.0)
        return world.steps

    assert trace(shuffle=False) == trace(shuffle=True)


def test_load_that_swings_stays_between_its_two_steady_rates() -> None:
    """No collapse and no flapping where the best regime changes with the load."""
    few, many = (rate(make_setting("mixed", n, 6), "steady", num_cycles=100) for n in (4, 24))
    world = LaneWorld(make_setting("mixed", 4, 6), SchedulingConfig(**ALWAYS))
    until = 12.0
    for start in np.arange(1.0, until, 1.5):
        for _ in range(20):
            world.at(float(start), lambda: world.submit(max_new_tokens=100))
    world.closed = lambda rid: len(world.state.requests) < 4
    world.run(1.0)
    before = world.worth
    world.run(until)
    assert 0.97 * few <= (world.worth - before) / (until - 1.0) <= 1.03 * many


def test_changed_at_run_time() -> None:
    setting = make_setting("memory", 8, 2)
    world = LaneWorld(setting, SchedulingConfig(**ALWAYS, gather="when_free"))
    seen = []
    for gather in ("when_free", "steady", "when_free"):
        world.state.configure(SchedulingConfig(**ALWAYS, gather=gather))
        world.run(world.now + 0.5)
        before = world.worth
        world.run(world.now + 2.0)
        seen.append((world.worth - before) / 2.0)
    assert seen[1] > 1.3 * seen[0]
    assert seen[1] > 1.1 * seen[2], "two groups may take a while to come apart again"


# --- prompts beside rounds ---------------------------------------------------------------------


def gaps_with_a_long_prompt(stretch: float) -> tuple[np.ndarray, float, LaneWorld]:
    """Times between the rounds of requests in steady decode while a 6k prompt is computed, and how
    long that takes."""
    setting = make_setting(
        "mixed", 16, 2, num_new_tokens=(4000, 4000), prefill_budget=2048, stagger_s=0.01
    )
    world = LaneWorld(setting, SchedulingConfig(**ALWAYS, prefill_stretch=stretch))
    world.run(1.0)
    world.submit(num_prompt=6000, max_new_tokens=4000)
    long_rid = max(world.state.requests)
    world.run(6.0)
    taken_s = world.first_token_s[long_rid]
    gaps = [
        later - sooner
        for rid, times in world.emitted_at.items()
        if rid != long_rid
        for sooner, later in itertools.pairwise(times)
        if 1.0 < sooner < 1.0 + taken_s
    ]
    return np.array(gaps), taken_s, world


def test_a_long_prompt_starves_nobody_and_nobody_starves_it() -> None:
    usual_s = make_setting("mixed", 16, 2).cycle_s
    gaps, taken_s, _ = gaps_with_a_long_prompt(1.0)
    assert np.quantile(gaps, 0.99) < 2.2 * (usual_s + 256 * 0.1e-3), "the least chunk, and jitter"
    unbounded, unbounded_s, _ = gaps_with_a_long_prompt(1000.0)
    assert np.quantile(unbounded, 0.99) > 3 * np.quantile(gaps, 0.99)
    assert taken_s < 3 * unbounded_s


def test_the_bound_on_a_step_with_prompts_is_kept() -> None:
    _, _, tight = gaps_with_a_long_prompt(0.25)
    _, _, loose = gaps_with_a_long_prompt(3.0)
    longest = [max(step_s for step_s, rows, _ in w.steps[40:] if rows) for w in (tight, loose)]
    assert longest[1] > 1.5 * longest[0]


def test_prompts_fill_the_time_in_which_blocks_are_drafted() -> None:
    """Where a step costs little by itself, a prompt is computed while nothing can be verified."""
    setting = make_setting("compute", 4, 60, num_new_tokens=(4000, 4000), stagger_s=0.01)
    world = LaneWorld(setting, SchedulingConfig(**ALWAYS, gather="wait_for_all"))
    world.run(1.0)
    before = len(world.steps)
    world.submit(num_prompt=2000, max_new_tokens=100)
    world.run(2.5)
    prompt_steps = [s for s in world.steps[before:] if s[1] == 0]
    assert prompt_steps
    assert all(step_s < 0.065 for step_s, _, _ in prompt_steps), "they end before the blocks come"
