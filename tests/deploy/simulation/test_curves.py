"""Step and draft curves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cluster.errors import ConfigError
from deploy.simulation.curves import Cliff, DraftCurve, StepCurve, profiled_curve
from deploy.simulation.leases import lease_of, profile_sizes
from deploy.simulation.specs import VerifierSpec
from router.step_load import StepLoad
from router.throughput import ThroughputProfile


def test_the_parts_add_up() -> None:
    curve = StepCurve(
        fixed_s=1.0,
        memory_s=4.0,
        per_token_s=0.5,
        per_row_s=0.1,
        per_context_s=0.01,
        per_pair_s=0.001,
        per_prefill_s=0.2,
        tile_tokens=4,
        cliffs=(Cliff(above=8, extra_s=10.0),),
    )
    load = StepLoad(num_rows=2, num_tokens=7, num_prefill=3, sum_context=50, num_pairs=120)
    beside = 0.2 + 0.5 + 0.12 + 0.6
    assert curve.step_s(load) == pytest.approx(1.0 + 4.0 + beside)  # 8 padded: 4 s either way
    larger = StepLoad(num_rows=2, num_tokens=9, num_prefill=3, sum_context=50, num_pairs=120)
    assert curve.step_s(larger) == pytest.approx(1.0 + 6.0 + 10.0 + beside)
    assert curve.padded(9) == 12
    grown = curve.curve_s(load, 9)
    assert len(grown) == 10
    assert grown[7] == pytest.approx(curve.step_s(load))
    assert grown[9] == pytest.approx(curve.step_s(larger))


def test_a_table_is_joined_by_lines_and_goes_on() -> None:
    curve = StepCurve(table_tokens=(2, 4, 8), table_s=(1.0, 2.0, 3.0))
    np.testing.assert_allclose(
        curve.of_tokens(np.array([1.0, 2, 3, 8, 12])), [1.0, 1.0, 1.5, 3.0, 4.0]
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"table_tokens": (1, 2), "table_s": (1.0,)},
        {"table_tokens": (2, 2), "table_s": (1.0, 1.0)},
        {"table_tokens": (0, 2), "table_s": (1.0, 1.0)},
        {"table_tokens": (1, 2), "table_s": (0.0, 1.0)},
    ],
)
def test_what_is_no_curve_is_refused(fields: dict[str, tuple[float, ...]]) -> None:
    with pytest.raises(ConfigError):
        StepCurve(**fields)  # type: ignore[arg-type]


def test_draft_batches() -> None:
    curve = DraftCurve(fixed_s=1.0, per_block_s=0.1, per_row_s=0.01)
    assert curve.draft_s(5, 20) == pytest.approx(1.7)


CURVE = StepCurve(
    fixed_s=0.01,
    per_token_s=1e-4,
    per_row_s=2e-5,
    per_context_s=1e-7,
    per_pair_s=1e-8,
    tile_tokens=8,
    cliffs=(Cliff(above=100, extra_s=0.004),),
)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_lease_says_what_the_curve_does(factor: float) -> None:
    spec = VerifierSpec(curve=CURVE, max_step_tokens=256, profile_factor=factor)
    profile = ThroughputProfile.of_lease(lease_of(spec, lane_epoch=3))
    for num_tokens in (8, 64, 96, 104, 256):
        load = StepLoad(num_rows=4, num_tokens=num_tokens, sum_context=4000)
        assert profile.step_s(load) == pytest.approx(factor * CURVE.step_s(load), rel=1e-4)


def test_both_sides_of_a_cliff_are_measured() -> None:
    sizes = profile_sizes(CURVE, 256)
    assert {104, 256} <= set(sizes)
    assert all(size % 8 == 0 for size in sizes)
    assert profile_sizes(StepCurve(fixed_s=1, tile_tokens=8), 4) == [4]


def test_a_measured_profile_is_a_curve(tmp_path: Path) -> None:
    profile = ThroughputProfile.of_lease(
        lease_of(VerifierSpec(curve=CURVE, max_step_tokens=256), lane_epoch=1)
    )
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile.snapshot().to_json()))
    curve = profiled_curve(path)
    load = StepLoad(num_rows=4, num_tokens=64, sum_context=4000, num_pairs=9000)
    assert curve.step_s(load) == pytest.approx(CURVE.step_s(load), rel=1e-4)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="no step profile"):
        profiled_curve(path)
    with pytest.raises(ConfigError, match="cannot read"):
        profiled_curve(tmp_path / "none")


def test_the_file_of_dspark_profile_is_a_curve(tmp_path: Path) -> None:
    costs = {"row_s": 1e-4, "context_s": 0.0, "pair_s": 0.0, "prefill_s": 0.0}
    profile = {"tokens": [1, 8], "live_s": [0.01, 0.02], "live_costs": costs}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"verifiers": [{"verifier": "a", "profile": profile}]}))
    assert profiled_curve(path).table_s == (0.01, 0.02)
    path.write_text(json.dumps({"verifiers": []}))
    with pytest.raises(ConfigError, match="no step profile"):
        profiled_curve(path)
