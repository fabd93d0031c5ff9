"""The profile: shape from the table, scale from the steps that ran."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.errors import FrameError
from router.throughput import ThroughputProfile


def profile(tokens: list[int], step_s: list[float]) -> ThroughputProfile:
    return ThroughputProfile(np.array(tokens, np.int32), np.array(step_s, np.float32))


def test_lines_between_the_points_flat_before_and_sloped_behind() -> None:
    p = profile([2, 4, 8], [0.1, 0.2, 0.2])
    times = [p.step_s(n) for n in (1, 2, 3, 4, 6, 8, 14)]
    assert times == pytest.approx([0.1, 0.1, 0.15, 0.2, 0.2, 0.2, 0.3], rel=1e-6)


def test_sps_is_indexed_by_tokens_and_charges_the_time_between_steps() -> None:
    p = profile([1, 3], [0.1, 0.3])
    assert p.sps(3) == pytest.approx([10, 10, 5, 1 / 0.3], rel=1e-6)
    for _ in range(500):
        p.record_gap(0.1)
    assert p.sps(3)[1] == pytest.approx(5, rel=1e-3)


def test_a_table_that_falls_is_levelled() -> None:
    p = profile([1, 2, 3], [0.2, 0.1, 0.3])
    assert [p.step_s(n) for n in (1, 2, 3)] == pytest.approx([0.2, 0.2, 0.3], rel=1e-6)


def test_scale_follows_the_machine_and_keeps_the_shape() -> None:
    p = profile([1, 10], [0.1, 0.2])
    ratio = p.step_s(10) / p.step_s(1)
    for _ in range(200):
        p.record(num_tokens=1, step_s=0.2)
    assert p.step_s(1) == pytest.approx(0.2, rel=0.01)
    assert p.step_s(10) / p.step_s(1) == pytest.approx(ratio)
    assert p.mean_error < 0.1, "the early misses are forgotten"


def test_one_freak_step_hardly_counts() -> None:
    p = profile([1], [0.1])
    p.record(num_tokens=1, step_s=1000.0)
    assert p.step_s(1) < 0.11
    p.record(num_tokens=0, step_s=1.0)
    p.record(num_tokens=1, step_s=0.0)
    assert p.num_steps == 1, "steps without tokens or time say nothing"


@pytest.mark.parametrize(
    ("tokens", "step_s"),
    [([], []), ([1], [0.1, 0.2]), ([0], [0.1]), ([2, 2], [0.1, 0.1]), ([1], [0.0])],
)
def test_never_without_a_table(tokens: list[int], step_s: list[float]) -> None:
    with pytest.raises(FrameError):
        profile(tokens, step_s)
