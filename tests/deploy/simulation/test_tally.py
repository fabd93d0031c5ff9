"""Totals that add up."""

from __future__ import annotations

import math

import numpy as np
import pytest

from deploy.simulation.tally import Histogram, Tally


def test_percentiles_of_a_histogram_are_within_a_bin() -> None:
    values = np.random.default_rng(0).lognormal(-3, 1, 20_000)
    histogram = Histogram()
    for part in np.split(values, 10):
        histogram.add(part.tolist())
    for percent in (1, 50, 99):
        assert histogram.percentile(percent) == pytest.approx(
            np.percentile(values, percent), rel=0.025
        )
    assert math.isnan(Histogram().percentile(50))


def tally_of(num_tokens: int, ttft_s: float) -> Tally:
    tally = Tally(window_s=4.0, num_tokens=num_tokens, num_arrived=2, verifier_s=4.0)
    tally.ttft_s.append(ttft_s)
    tally.gaps.add([0.1, 0.1])
    tally.counters = {"num_verify_rows": 10.0, "num_verified": 30.0, "num_emitted": 25.0}
    tally.timeline.tokens[3] = num_tokens
    return tally


def test_cells_add_up() -> None:
    total = Tally()
    for tally in (tally_of(8, 1.0), tally_of(4, 3.0)):
        total.merge(tally)
    figures = total.figures()
    assert figures["tokens_per_s"] == 3.0
    assert figures["requests"]["arrived"] == 4
    assert figures["ttft_s"]["mean"] == 2.0
    assert figures["budget"] == 4.0
    assert figures["accepted_length"] == 2.5
    assert figures["verifiers"] == 2.0
    assert figures["itl_s"]["p50"] == pytest.approx(0.1, rel=0.03)
    assert total.timeline.tokens[3] == 12


def test_nothing_is_null_and_no_fault() -> None:
    figures = Tally(window_s=1.0).figures()
    assert figures["tokens_per_s"] == 0.0
    assert figures["accepted_length"] is None
    assert figures["ttft_s"]["p95"] is None
    assert figures["itl_s"]["p50"] is None


def test_a_histogram_counts_alike_however_its_values_come() -> None:
    values = np.random.default_rng(1).lognormal(-3, 2, 10_000).tolist()
    once, slowly, late = Histogram(), Histogram(), Histogram()
    once.add(values)
    for value in values:
        slowly.add([value])
    late.add([1e-9, 1e9])
    assert (once.counts == slowly.counts).all()
    assert (late.counts[0], late.counts[-1]) == (1, 1), "the ends take what lies outside"
    once.merge(late)
    assert once.counts.sum() == 10_002
    assert late.counts.sum() == 2
