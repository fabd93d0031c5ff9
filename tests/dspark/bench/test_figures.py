"""Figures of hand-made loads."""

from __future__ import annotations

import pytest

from dspark.bench.figures import (
    accepted_length,
    attainment,
    between_arrivals,
    load_figures,
    rates,
    spread,
)
from dspark.bench.sample import Sample, Window
from tests.dspark.bench.made_samples import make_sample, make_usage

WINDOW = Window(begin_s=10.0, end_s=20.0)

WHOLE = make_sample(
    [(11.0, 1), (12.0, 3), (14.0, 2)],
    scheduled_s=10.5,
    ended_s=14.0,
    usage=make_usage(6, 2, verified=5),
)
EARLY = make_sample([(8.0, 1), (9.0, 4), (10.0, 2)], scheduled_s=7.0, ended_s=10.0)
LATE = make_sample([(19.0, 1), (20.0, 5)], scheduled_s=18.0, domain="code")
FAILED = make_sample([], scheduled_s=12.0, ended_s=12.5, error="Overloaded", domain="code")


def test_rates_count_what_arrives_in_the_window_whoever_asked() -> None:
    found = rates([WHOLE, EARLY, LATE, FAILED], WINDOW)
    assert found["tokens"] == 6 + 2 + 1, "a message at the window's end is the next one's"
    assert found["tokens_per_s_total"] == pytest.approx(0.9)
    # 3.5 s of WHOLE, none of EARLY, 2 s of LATE, 0.5 s of FAILED.
    assert found["mean_concurrency"] == pytest.approx(0.6)
    assert found["tokens_per_s_user"] == pytest.approx(9 / 6.0)
    assert found["rounds"] == 3
    assert found["accepted_length"] == pytest.approx((3 + 2 + 2) / 3), "without prefill tokens"


def test_a_window_between_arrivals_holds_whole_steps_only() -> None:
    """Four tokens every 2 s are 2 tokens/s, wherever the window's edges fall."""
    steps = make_sample([(2.0 * i, 4) for i in range(20)])
    for begin_s in (9.0, 9.5, 10.0, 10.9):
        window = between_arrivals([steps], Window(begin_s=begin_s, end_s=begin_s + 9.3))
        found = rates([steps], window)
        assert found["tokens_per_s_total"] == pytest.approx(2.0)
        assert found["tokens"] >= 16
    assert between_arrivals([], WINDOW) == WINDOW
    assert between_arrivals([make_sample([(3.0, 1)])], WINDOW) == WINDOW


def test_latencies_are_those_of_requests_scheduled_in_the_window() -> None:
    found = load_figures([WHOLE, EARLY, LATE, FAILED], WINDOW)
    assert found["requests"] == {
        "scheduled": 3,
        "completed": 1,
        "unfinished": 1,
        "errors": {"Overloaded": 1},
    }
    assert found["ttft_s"]["count"] == 2
    assert found["ttft_s"]["mean"] == pytest.approx((0.5 + 1.0) / 2)
    assert found["user_tokens_per_s"]["p50"] == pytest.approx(6 / 3.5)
    assert found["inter_message_s"]["count"] == 3
    # WHOLE: three tokens of 1/3 s and two of 1 s; LATE: five of 0.2 s.
    assert found["inter_token_s"]["mean"] == pytest.approx((1.0 + 2.0 + 1.0) / 10)
    assert found["drafts"]["verified_per_round"] == pytest.approx(2.5)
    assert found["drafts"]["accepted_length"] == pytest.approx(2.5)
    assert found["slo"] is None
    assert found["domains"]["code"]["requests"]["errors"] == {"Overloaded": 1}
    assert found["domains"]["chat"]["rates"]["tokens"] == 8


def test_the_wait_counts_from_the_schedule_not_from_the_sending() -> None:
    sample = make_sample([(3.5, 1), (4.0, 2)], scheduled_s=1.0, ended_s=4.0)
    sample.sent_s = 3.0
    assert sample.ttft_s == pytest.approx(2.5)
    assert sample.user_rate == pytest.approx(1.0)
    assert sample.decode_rate == pytest.approx(4.0)


def test_attainment_names_the_share_and_the_tail() -> None:
    def decoding_at(rate: float) -> Sample:
        return make_sample([(0.0, 1), (1 / rate, 1)], ended_s=1.0, target=10.0)

    found = attainment([decoding_at(rate) for rate in (5.0, 10.0, 20.0, 40.0)])
    assert found is not None
    assert found["attained"] == pytest.approx(0.75)
    assert found["p5"] == pytest.approx(0.5 + 0.15 * 0.5)
    assert attainment([make_sample([(0.0, 1)], ended_s=1.0, target=10.0)]) is None


def test_percentiles_and_nothing_at_all() -> None:
    found = spread(range(101))
    assert found == {"mean": 50.0, "p50": 50.0, "p95": 95.0, "p99": 99.0, "count": 101}
    assert spread([]) is None
    assert accepted_length([make_usage(1, 0)]) is None
    empty = load_figures([], WINDOW)
    assert empty["rates"]["tokens_per_s_total"] == 0.0
    assert empty["drafts"]["verified_per_round"] is None
