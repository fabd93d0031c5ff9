"""The live profile on synthetic machines: what it predicts, how it learns, when it warns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import FrameError, InvalidRequest
from cluster.profile_snapshot import ProfileSnapshot
from cluster.step_costs import StepCosts
from router.step_load import StepLoad
from router.throughput import ThroughputProfile

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
COSTS = StepCosts(row_s=4e-4, context_s=4e-6, pair_s=1e-6, prefill_s=-4e-4)


def profile(tokens: Iterable[int], step_s: Iterable[float], **options: object) -> ThroughputProfile:
    times = np.array(list(step_s), np.float32)
    return ThroughputProfile(np.array(list(tokens), np.int32), times, **options)  # type: ignore[arg-type]


def of_tokens(num_tokens: int) -> StepLoad:
    return StepLoad(num_rows=1, num_tokens=num_tokens)


def decode(rows: int, width: int, context: int) -> StepLoad:
    """A step of so many rows of so many tokens, each at this context."""
    return StepLoad(
        num_rows=rows,
        num_tokens=rows * width,
        sum_context=rows * (context + width),
        num_pairs=rows * (width * context + width * (width + 1) // 2),
    )


@dataclasses.dataclass
class Machine:
    """A verifier whose law is known."""

    costs: StepCosts = COSTS
    fixed_s: float = 0.04
    token_s: float = 0.002
    stair_s: float = 0.0
    """Extra seconds per whole 64 tokens begun."""
    noise: float = 0.02
    speed: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def tier_s(self, tokens: int) -> float:
        return self.fixed_s + self.token_s * tokens + self.stair_s * ((tokens - 1) // 64)

    def step_s(self, load: StepLoad) -> float:
        """Without noise."""
        costs = self.costs
        return self.speed * (
            self.tier_s(load.num_tokens)
            + costs.row_s * load.num_rows
            + costs.context_s * load.sum_context
            + costs.pair_s * load.num_pairs
            + costs.prefill_s * load.num_prefill
        )

    def run(self, load: StepLoad) -> float:
        return self.step_s(load) * float(self.rng.lognormal(0.0, self.noise))

    def play(self, p: ThroughputProfile, num_steps: int, loads: Callable[[int], StepLoad]) -> None:
        for i in range(num_steps):
            load = loads(i)
            p.record(load, self.run(load))

    def known(self, tokens: tuple[int, ...] = TOKENS, **options: object) -> ThroughputProfile:
        """A profile that was measured without an error."""
        times = [self.tier_s(n) for n in tokens]
        return profile(tokens, times, **{"costs": self.costs, **options})


def steady(i: int) -> StepLoad:
    return decode(8, (8, 4, 2)[i % 3], 200 + i % 100)


def varied(rng: np.random.Generator) -> Callable[[int], StepLoad]:
    def load(i: int) -> StepLoad:
        del i
        return decode(
            int(rng.integers(1, 33)), int(rng.integers(1, 9)), int(rng.integers(20, 1500))
        )

    return load


def off(p: ThroughputProfile, machine: Machine, load: StepLoad) -> float:
    """Relative error against the law without noise."""
    return abs(p.step_s(load) / machine.step_s(load) - 1)


# --- what it predicts ---------------------------------------------------------------------------


def test_lines_between_the_points_flat_before_and_sloped_behind() -> None:
    p = profile([2, 4, 8], [0.1, 0.2, 0.2])
    times = [p.step_s(of_tokens(n)) for n in (1, 2, 3, 4, 6, 8, 14)]
    assert times == pytest.approx([0.1, 0.1, 0.15, 0.2, 0.2, 0.2, 0.3], rel=1e-6)


def test_every_term_is_charged() -> None:
    machine = Machine()
    p = machine.known()
    for load in (
        decode(1, 1, 64),
        decode(16, 8, 900),
        StepLoad(num_rows=3, num_tokens=64, num_prefill=40, sum_context=900, num_pairs=9000),
    ):
        assert p.step_s(load) == pytest.approx(machine.step_s(load), rel=1e-6)


def test_pairs_that_are_not_known_are_taken_from_the_mean() -> None:
    known = decode(8, 4, 500)
    guessed = dataclasses.replace(known, num_pairs=0)
    assert guessed.pairs == pytest.approx(known.num_pairs, rel=0.01)
    assert StepLoad(num_rows=0, num_tokens=0).pairs == 0.0


@given(
    st.integers(1, 40),
    st.integers(0, 300),
    st.integers(0, 60_000),
    st.integers(0, 200),
)
@settings(max_examples=60, deadline=None)
def test_the_curve_is_the_step_grown_by_draft_tokens(
    rows: int, prefill: int, context: int, drafts: int
) -> None:
    p = Machine(stair_s=0.01).known((1, 63, 64, 65, 128, 129, 256))
    base = StepLoad(
        num_rows=rows, num_tokens=rows + prefill, num_prefill=prefill, sum_context=context
    )
    most = base.num_tokens + drafts
    curve = p.curve_s(base, most)
    assert len(curve) == most + 1
    assert (np.diff(curve) >= -1e-12).all()
    assert (curve > 0).all()
    assert curve[base.num_tokens] == pytest.approx(p.step_s(base))
    grown = dataclasses.replace(base, num_tokens=most)
    if prefill == 0:
        assert curve[most] == pytest.approx(p.step_s(grown))


def test_curve_past_the_last_tier_goes_on_and_is_cached_right() -> None:
    p = profile([1, 3], [0.1, 0.3])
    base = of_tokens(1)
    assert p.curve_s(base, 3) == pytest.approx([0.1, 0.1, 0.2, 0.3], rel=1e-6)
    assert p.curve_s(base, 5) == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.5], rel=1e-6)
    p.curve_s(base, 5)[:] = 7.0
    assert p.curve_s(base, 2) == pytest.approx([0.1, 0.1, 0.2], rel=1e-6)


def test_a_table_that_falls_is_levelled() -> None:
    p = profile([1, 2, 3], [0.2, 0.1, 0.3])
    assert [p.step_s(of_tokens(n)) for n in (1, 2, 3)] == pytest.approx([0.2, 0.2, 0.3], rel=1e-6)


def test_no_step_takes_no_time() -> None:
    p = profile([1, 64], [0.1, 0.11], costs=StepCosts(prefill_s=-0.1))
    load = StepLoad(num_rows=0, num_tokens=64, num_prefill=64)
    assert 0 < p.step_s(load) < 0.01
    assert (p.curve_s(load, 64) > 0).all()


@pytest.mark.parametrize(
    ("tokens", "step_s"),
    [
        ([], []),
        ([1], [0.1, 0.2]),
        ([0], [0.1]),
        ([2, 2], [0.1, 0.1]),
        ([3, 2], [0.1, 0.1]),
        ([1], [0.0]),
        ([1, 2], [0.1, np.nan]),
        ([1], [np.inf]),
    ],
)
def test_never_without_a_table(tokens: list[int], step_s: list[float]) -> None:
    with pytest.raises(FrameError):
        profile(tokens, step_s)


def test_bad_costs_and_spreads_are_refused() -> None:
    for costs in ({"row_s": -1.0}, {"context_s": np.inf}, {"prefill_s": np.nan}):
        with pytest.raises(FrameError):
            StepCosts(**costs)
    for noise in (-0.1, np.nan, np.inf):
        with pytest.raises(FrameError):
            profile([1], [0.1], noise=noise)


# --- how it learns ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_costs_are_recovered_from_noisy_steps(seed: int) -> None:
    """Started with costs and tiers that are a third off, each in its own direction."""
    machine = Machine(noise=0.03, seed=seed)
    rng = np.random.default_rng(seed)
    wrong = StepCosts(row_s=6e-4, context_s=2.7e-6, pair_s=1.3e-6, prefill_s=-4e-4)
    times = [machine.tier_s(n) * rng.uniform(0.9, 1.1) for n in TOKENS]
    p = profile(TOKENS, times, costs=wrong)
    loads = varied(rng)
    machine.play(p, 800, loads)
    errors = [off(p, machine, loads(0)) for _ in range(200)]
    assert np.median(errors) < 0.015
    assert np.quantile(errors, 0.95) < 0.04
    assert p.snapshot().live_costs.context_s == pytest.approx(COSTS.context_s, rel=0.25)


def test_without_measured_costs_they_are_learnt() -> None:
    machine = Machine()
    p = profile(TOKENS, [machine.tier_s(n) for n in TOKENS])
    rng = np.random.default_rng(1)
    machine.play(p, 1000, varied(rng))
    loads = varied(rng)
    assert np.median([off(p, machine, loads(0)) for _ in range(200)]) < 0.02


def test_context_twenty_times_the_profiled_one() -> None:
    """Costs 10% off, as measured at context 256; then contexts grow to 5120."""
    machine = Machine()
    costs = StepCosts(row_s=4e-4, context_s=3.6e-6, pair_s=1.1e-6, prefill_s=-4e-4)
    p = machine.known(costs=costs)
    machine.play(p, 300, lambda i: decode(8, 4, 256))
    for context in (2560, 5120):
        load = decode(8, 4, context)
        assert off(p, machine, load) < 0.10, "unseen"
        machine.play(p, 100, lambda i, load=load: load)  # type: ignore[misc]
        assert off(p, machine, load) < 0.03, "after a while"


@pytest.mark.parametrize("factor", [2.0, 0.5, 4.0])
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_a_machine_that_changes_is_followed_and_so_is_its_recovery(
    factor: float, noise: float
) -> None:
    machine = Machine(noise=noise)
    p = machine.known()
    machine.play(p, 300, steady)
    unseen = decode(32, 8, 800)
    for speed in (factor, 1.0):
        machine.speed = speed
        machine.play(p, 200, steady)
        tolerance = 0.03 + 0.5 * noise
        assert all(off(p, machine, steady(i)) < tolerance for i in range(30))
        assert off(p, machine, unseen) < 0.10 + noise, "the rest of the table moves along"
    assert p.scale == pytest.approx(1.0, rel=0.15)


def test_outliers_do_not_wreck_the_table() -> None:
    """One step in twelve takes up to fifty times as long: pauses, a busy neighbour."""
    machine, rng = Machine(), np.random.default_rng(5)
    p = machine.known()
    machine.play(p, 200, steady)
    for i in range(600):
        freak = float(rng.uniform(2, 50)) if rng.random() < 1 / 12 else 1.0
        p.record(steady(i), machine.run(steady(i)) * freak)
    assert all(off(p, machine, steady(i)) < 0.04 for i in range(30))
    assert off(p, machine, decode(32, 8, 800)) < 0.08
    assert p.median_error < 0.03 < p.mean_error


def test_one_freak_step_hardly_counts() -> None:
    p = profile([1], [0.1])
    p.record(of_tokens(1), 1000.0)
    assert p.step_s(of_tokens(1)) < 0.11
    for bad in (0.0, -1.0, np.nan, np.inf):
        p.record(of_tokens(1), bad)
    p.record(StepLoad(num_rows=0, num_tokens=0), 1.0)
    assert p.num_steps == 1, "steps without tokens or time say nothing"


def test_a_tier_is_corrected_and_forgotten_again() -> None:
    """16 tokens run 25% slower than measured: learnt there, shared with the neighbours, not with
    the far ones, and shrunk to the prior when it is not seen any more."""
    machine = Machine(costs=StepCosts(), noise=0.01)
    p = machine.known()
    others = (1, 2, 4, 64, 128, 256)

    def load(i: int) -> StepLoad:
        return of_tokens(16 if i % 2 else others[i // 2 % len(others)])

    for i in range(600):
        slow = 1.25 if i % 2 else 1.0
        p.record(load(i), slow * machine.run(load(i)))
    assert p.step_s(of_tokens(16)) == pytest.approx(1.25 * machine.tier_s(16), rel=0.03)
    assert p.step_s(of_tokens(256)) == pytest.approx(machine.tier_s(256), rel=0.03)
    machine.play(p, 6000, lambda i: of_tokens(others[i % len(others)]))
    assert p.step_s(of_tokens(16)) == pytest.approx(machine.tier_s(16), rel=0.06)


def test_measured_stairs_stay_and_none_are_invented() -> None:
    tokens = (1, 32, 63, 64, 65, 66, 96, 127, 128, 129, 192)
    machine = Machine(stair_s=0.05, costs=StepCosts(), noise=0.05)
    p = machine.known(tokens)
    rng = np.random.default_rng(2)
    machine.play(p, 1500, lambda i: of_tokens(int(rng.integers(1, 193))))
    rise = np.diff(p.curve_s(of_tokens(1), 192))[1:]  # from B = 1 to 2 on
    stairs = {64: "64 to 65", 128: "128 to 129"}
    for at in stairs:
        assert rise[at - 1] > 0.8 * machine.stair_s
    others = np.delete(rise, [at - 1 for at in stairs])
    assert others.max() < 0.2 * machine.stair_s


def test_what_is_learnt_depends_on_the_steps_alone() -> None:
    snapshots = []
    for _ in range(2):
        machine = Machine(noise=0.1, seed=4)
        p = machine.known()
        machine.play(p, 300, varied(np.random.default_rng(6)))
        snapshots.append(p.snapshot())
    assert snapshots[0] == snapshots[1]


def test_the_gap_between_steps_is_a_running_mean() -> None:
    p = profile([1, 3], [0.1, 0.3])
    for _ in range(500):
        p.record_gap(0.1)
    assert p.overhead_s == pytest.approx(0.1)
    p.record_gap(-5.0)
    assert 0 < p.overhead_s < 0.1


# --- what can be turned off ---------------------------------------------------------------------


def test_a_table_kept_as_measured() -> None:
    machine = Machine(speed=2.0)
    p = machine.known()
    p.live = False
    machine.play(p, 300, steady)
    assert p.step_s(steady(0)) == pytest.approx(machine.step_s(steady(0)) / 2, rel=0.01)
    assert {"inert", "error"} <= set(p.alarms)
    p.live = True
    assert off(p, machine, steady(0)) < 0.03, "it has learnt all the while"
    assert "inert" not in p.alarms


def test_a_table_without_the_context() -> None:
    machine = Machine()
    p = machine.known()
    p.context_term = False
    short, long = decode(8, 4, 100), decode(8, 4, 3000)
    assert p.step_s(short) == p.step_s(long)
    assert np.ptp(p.curve_s(short, 200) - p.curve_s(long, 200)) == 0
    machine.play(p, 300, lambda i: long)
    assert off(p, machine, long) < 0.04, "then the speed takes the blame"
    assert p.scale > 1.2


# --- exploring, errors and alarms ---------------------------------------------------------------


def test_exploring_is_rare_even_and_blind() -> None:
    p = profile(TOKENS, np.linspace(0.01, 0.1, len(TOKENS)))
    turns = [p.explore(step) for step in range(6400)]
    assert 0.01 <= np.mean(np.abs(turns)) <= 0.02
    assert abs(sum(turns)) <= 4
    where = np.flatnonzero(turns)
    assert np.diff(where).max() < 200, "no long time without"
    p.record(of_tokens(4), 0.5)
    assert turns == [p.explore(step) for step in range(6400)]
    assert [p.tier_at(17, offset) for offset in (-1, 0, 1)] == [8, 16, 32]
    assert p.tier_at(1, -1) == 1
    assert p.tier_at(999, 1) == 512


@pytest.mark.parametrize("noise", [0.02, 0.08])
def test_the_error_is_no_more_than_the_spread_of_equal_steps_allows(noise: float) -> None:
    machine = Machine(noise=noise)
    p = machine.known()
    machine.play(p, 600, lambda i: decode(8, (8, 4, 2)[i % 3], 200))
    expected = 0.6745 * noise  # the median of |normal|
    assert p.spread == pytest.approx(expected, rel=0.3)
    assert p.median_error < 1.5 * p.spread
    assert p.alarms == ()


def test_alarms() -> None:
    flat = profile([1, 64], [0.1, 0.1005])
    assert flat.alarms == ("flat",)
    assert profile([1, 2], [0.1, 0.1]).alarms == (), "too narrow a range to tell"
    p = Machine().known()
    rng = np.random.default_rng(0)
    for i in range(64):
        assert p.alarms == (), "a few steps say nothing"
        p.record(steady(i), float(rng.uniform(0.02, 0.4)))
    assert p.alarms == ("error",)
    figures = p.figures()
    assert [figures[f"alarm.{name}"] for name in ("flat", "inert", "error")] == [0, 0, 1]
    assert figures["median_error"] == p.median_error > 0.1


# --- plain data ---------------------------------------------------------------------------------


def test_snapshot_there_and_back() -> None:
    machine = Machine()
    p = machine.known(fingerprint="model/platform/1")
    machine.play(p, 300, steady)
    snapshot = p.snapshot()
    assert ProfileSnapshot.from_json(snapshot.to_json()) == snapshot
    assert snapshot.num_steps == sum(snapshot.num_tier_steps) == 300
    assert snapshot.fingerprint == "model/platform/1"
    assert len(snapshot.recent) == 256
    assert snapshot.fixed_s == pytest.approx(machine.tier_s(1), rel=0.1)


def test_what_is_no_snapshot_is_refused() -> None:
    good = Machine().known().snapshot().to_json()
    for bad in (
        [],
        {},
        good | {"more": 1},
        good | {"tokens": "1"},
        good | {"tokens": [1.5]},
        good | {"prior_s": [0.1]},
        good | {"scale": float("nan")},
        good | {"live": 1},
        good | {"live_costs": {}},
        good | {"recent": [{}]},
    ):
        with pytest.raises(InvalidRequest):
            ProfileSnapshot.from_json(bad)
