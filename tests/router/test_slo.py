"""Weights from history, and who got the rate that was asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cluster.tiers import TIER_WEIGHTS
from router.lane_request import LaneRequest
from router.progress import Progress
from router.slo import MAX_URGENCY, Attainment, urgency, weights
from tests.frames import make_sampling


def after(num_tokens: int, seconds: float) -> Progress:
    """So many tokens after the first one, in so many seconds."""
    progress = Progress()
    progress.note(1, 100.0)
    progress.note(num_tokens, 100.0 + seconds)
    return progress


def make_row(**changes: Any) -> LaneRequest:
    values: dict[str, Any] = {
        "rid": 1,
        "ids": [1, 2],
        "num_prompt": 2,
        "max_new_tokens": 100,
        "stop_ids": (),
        "sampling": make_sampling(),
        "draft": True,
    }
    return LaneRequest(**(values | changes))


def test_the_clock_starts_with_the_first_token() -> None:
    progress = Progress()
    assert progress.rate is None
    progress.note(3, 50.0)  # a round of three
    assert progress.rate is None
    assert progress.num_tokens == 2
    progress.note(4, 52.0)
    assert (progress.elapsed_s, progress.num_tokens, progress.rate) == (2.0, 6, 3.0)


def test_a_request_counts_what_its_rounds_emit() -> None:
    row = make_row()
    row.commit((7,), 0, 10.0)
    row.commit((8, 9, 9), 0, 11.0)
    assert (row.progress.num_tokens, row.progress.elapsed_s) == (3, 1.0)
    assert row.ids == [1, 2, 7, 8, 9, 9]


def test_urgency_rises_with_the_lag_and_falls_with_the_lead() -> None:
    assert urgency(10.0, Progress()) == 1.0
    assert urgency(10.0, after(100, 10.0)) == pytest.approx(1.0)
    lags = [urgency(10.0, after(num, 10.0)) for num in (150, 110, 100, 90, 60)]
    assert lags == sorted(lags)
    assert lags[1] < 1.0 < lags[3]
    assert urgency(10.0, after(0, 1e9)) == MAX_URGENCY
    assert urgency(10.0, after(10**9, 1.0)) == 1 / MAX_URGENCY
    assert urgency(0.0, after(1, 1e9)) == 1.0, "no target"


def test_weights_of_tiers_and_targets() -> None:
    late = after(10, 10.0)
    rows = [
        make_row(progress=late),
        make_row(tier="interactive", progress=late),
        make_row(tier="batch"),
        make_row(target_rate=1e5, tier="batch", progress=late),
    ]
    batch = TIER_WEIGHTS["batch"]
    expected = [1.0, TIER_WEIGHTS["interactive"], batch, batch * MAX_URGENCY]
    assert weights(rows).tolist() == pytest.approx(expected)
    assert weights([]).shape == (0,)


def test_attainment() -> None:
    attainment = Attainment()
    assert attainment.figures() == {"num_requests": 0.0, "num_met": 0.0}
    attainment.add(0.0, after(10, 1.0))  # no target
    attainment.add(5.0, Progress())  # no token
    attainment.add(5.0, after(0, 0.0))  # one round only: no rate
    assert attainment.num_requests == 0
    for num_tokens in range(1, 101):  # ratios 0.02 .. 2.0
        attainment.add(5.0, after(num_tokens, 10.0))
    figures = attainment.figures()
    assert figures["num_requests"] == 100
    assert figures["num_met"] == 51  # 1.0 is met
    assert figures["share_met"] == pytest.approx(0.51)
    assert figures["ratio_p5"] == pytest.approx(float(np.quantile(np.arange(1, 101) / 50, 0.05)))
    assert figures["ratio_p50"] == pytest.approx(1.01)


def test_percentiles_are_of_the_latest_requests() -> None:
    attainment = Attainment()
    for num_tokens in [1] * 2000 + [100] * 2000:
        attainment.add(5.0, after(num_tokens, 10.0))
    figures = attainment.figures()
    assert figures["share_met"] == 1.0
    assert figures["ratio_p5"] == pytest.approx(2.0)
    assert (figures["num_requests"], figures["num_met"]) == (4000, 2000)
