"""Totals are sums over steps, and every one of them is in the metrics."""

from __future__ import annotations

from router.counters import LaneCounters
from tests.frames import make_result
from tests.router.lane_rig import Rig


def test_what_steps_report_adds_up() -> None:
    counters = LaneCounters()
    reported = {
        "num_real_tokens": (9, 4),
        "num_padded_tokens": (16, 4),
        "num_prefill_tokens": (8, 0),
        "num_cached_tokens": (48, 16),
        "num_preempted": (0, 3),
    }
    for step in range(2):
        values = {name: pair[step] for name, pair in reported.items()}
        counters.count_step(make_result(step_s=0.5, **values), predicted_step_s=0.25)
    figures = counters.snapshot()
    assert {name: figures[name] for name in reported} == {
        name: float(sum(pair)) for name, pair in reported.items()
    }
    assert (figures["num_steps"], figures["step_s"], figures["predicted_step_s"]) == (2, 1.0, 0.5)


def test_a_lane_counts_what_its_verifier_found_and_took_away() -> None:
    rig = Rig()
    rig.add(1)
    step = rig.step()
    rig.state.apply(rig.result(step, prefilled=(1,), num_cached_tokens=2, num_preempted=1), rig.now)
    assert rig.counters.snapshot()["num_cached_tokens"] == 2
    assert rig.counters.snapshot()["num_preempted"] == 1
