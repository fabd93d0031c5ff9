"""Devices with prices, and curves that follow from data sheets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.errors import ConfigError
from deploy.simulation.prices import (
    DATASHEETS,
    DeviceSpec,
    KernelSpec,
    ModelSize,
    draft_curve,
    kv_tokens,
    step_curve,
)
from router.step_load import StepLoad

H100 = DeviceSpec(name="h100", datasheet="h100-sxm", dollars_per_hour=3.0)
TARGET = ModelSize(weights_gb=16.0, active_b=8.0, kv_bytes_per_token=131072.0)
KERNELS = KernelSpec(bandwidth=0.5, arithmetic=0.5, step_overhead_s=0.001)


def test_a_small_step_reads_the_weights_and_a_large_one_computes() -> None:
    curve = step_curve(H100, TARGET, KERNELS)
    reading = 0.001 + 16e9 / (3350e9 * 0.5)
    assert curve.step_s(StepLoad(num_rows=1, num_tokens=1)) == pytest.approx(reading)
    computing = 0.001 + 2 * 8e9 * 2048 / (989e12 * 0.5)
    assert curve.step_s(StepLoad(num_rows=1, num_tokens=2048)) == pytest.approx(computing)
    context = StepLoad(num_rows=1, num_tokens=1, sum_context=100_000)
    assert curve.step_s(context) - reading == pytest.approx(131072 * 1e5 / (3350e9 * 0.5))


def test_two_devices_halve_the_step_but_for_what_they_lose() -> None:
    both = replace(H100, per_verifier=2)
    kernels = replace(KERNELS, step_overhead_s=0.0, parallel=0.8)
    load = StepLoad(num_rows=1, num_tokens=1)
    one_s = step_curve(H100, TARGET, kernels).step_s(load)
    assert step_curve(both, TARGET, kernels).step_s(load) == pytest.approx(one_s / 1.8)
    assert both.verifier_dollars == 6.0


def test_memory_is_what_weights_and_a_drafter_beside_them_leave() -> None:
    alone = kv_tokens(H100, TARGET, KERNELS, beside=None)
    assert alone == int((80e9 * 0.9 - 16e9) / 131072)
    drafter = ModelSize(weights_gb=2.0, active_b=1.0, kv_bytes_per_token=20480.0)
    assert kv_tokens(H100, TARGET, KERNELS, beside=drafter) == int((72e9 - 18e9) / (131072 + 20480))


def test_a_draft_batch_grows_with_blocks_and_context() -> None:
    drafter = ModelSize(weights_gb=2.0, active_b=1.0, kv_bytes_per_token=20480.0)
    short = draft_curve(H100, drafter, KERNELS, gamma=7, context=0)
    long = draft_curve(H100, drafter, KERNELS, gamma=7, context=10_000)
    assert short.fixed_s == pytest.approx(KERNELS.draft_overhead_s + 2e9 / (3350e9 * 0.5))
    assert short.per_block_s == pytest.approx(7 * 2e9 / (989e12 * 0.5))
    assert long.per_block_s - short.per_block_s == pytest.approx(20480 * 1e4 / (3350e9 * 0.5))


def test_what_was_measured_goes_before_the_roofline(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    costs = dict.fromkeys(("row_s", "context_s", "pair_s", "prefill_s"), 0.0)
    path.write_text(json.dumps({"tokens": [1, 64], "live_s": [0.02, 0.04], "live_costs": costs}))
    device = replace(H100, profile=str(path), draft_fixed_s=0.003, draft_per_block_s=0.0001)
    assert step_curve(device, TARGET, KERNELS).step_s(StepLoad(num_rows=1, num_tokens=1)) == 0.02
    assert draft_curve(device, TARGET, KERNELS, gamma=7, context=99).draft_s(10) == 0.004
    assert str(path) in device.source


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"datasheet": "h100-sxm", "dollars_per_hour": 1.0}, "without a name"),
        ({"name": "x", "datasheet": "h100-sxm"}, "dollars_per_hour"),
        ({"name": "x", "datasheet": "z80", "dollars_per_hour": 1.0}, "z80"),
        ({"name": "x", "memory_gb": 24.0, "dollars_per_hour": 1.0}, "bandwidth_gb_s"),
    ],
)
def test_an_incomplete_device_is_refused(fields: dict, said: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ConfigError, match=said):
        DeviceSpec(**fields)


def test_every_data_sheet_is_complete_and_names_its_source() -> None:
    for sheet in DATASHEETS.values():
        assert min(sheet.memory_gb, sheet.bandwidth_gb_s, sheet.tflops) > 0
        assert "data sheet" in sheet.source
