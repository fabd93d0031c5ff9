"""The picture of throughput profiles, whatever there is to draw."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from cluster.profile_snapshot import ProfileSnapshot
from deploy.profile_picture import draw_profiles
from dspark.profile_tables import figures
from router.step_load import StepLoad
from router.throughput import ThroughputProfile


def snapshot(num_steps: int, *, sizes: int = 3) -> ProfileSnapshot:
    tokens = 4 ** np.arange(sizes, dtype=np.int32)
    profile = ThroughputProfile(tokens, (0.01 + 0.001 * tokens).astype(np.float32))
    for i in range(num_steps):
        load = StepLoad(num_rows=i % 3, num_tokens=1 + i % 16, sum_context=90 * i)
        profile.record(load, 0.02 + 0.001 * (i % 5))
    return profile.snapshot()


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


@pytest.mark.parametrize("num_steps", [0, 1, 300])
def test_one_verifier(num_steps: int) -> None:
    assert len(draw_profiles([("verifier $0$", snapshot(num_steps))])) > 10_000


def test_a_row_for_each_verifier() -> None:
    one = size_of(draw_profiles([("a", snapshot(9))]))
    three = size_of(draw_profiles([(name, snapshot(9)) for name in "abc"]))
    assert three == (one[0], 3 * one[1])


def test_nothing_and_single_tiers() -> None:
    assert size_of(draw_profiles([]))
    assert size_of(draw_profiles([("a", snapshot(3, sizes=1))]))


def test_without_a_step_no_error_is_claimed() -> None:
    assert "no steps yet" in figures(snapshot(0))[1]
    assert "predicted times are off by" in figures(snapshot(5))[1]
