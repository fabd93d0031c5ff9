"""Paired ratios and their lower bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from dspark.bench.ratios import _T90, paired_ratio


def test_the_table_is_students_t() -> None:
    expected = [stats.t.ppf(0.9, df) for df in range(1, len(_T90) + 1)]
    assert list(_T90) == pytest.approx(expected, abs=5e-5)


def test_a_common_factor_of_both_sides_counts_for_nothing() -> None:
    theirs = [10.0, 40.0, 20.0]
    ratio = paired_ratio([1.2 * value for value in theirs], theirs)
    assert ratio.ratio == pytest.approx(1.2)
    assert ratio.lower == pytest.approx(1.2)
    assert ratio.pairs == 3


def test_the_bound_holds_in_nine_of_ten_cases() -> None:
    draws = np.random.default_rng(0).normal(math.log(1.1), 0.1, (4000, 5))
    bounds = [paired_ratio(np.exp(row).tolist(), [1.0] * 5).lower for row in draws]
    share = np.mean([bound is not None and bound <= 1.1 for bound in bounds])
    assert share == pytest.approx(0.9, abs=0.015)


def test_one_pair_has_no_bound() -> None:
    assert paired_ratio([3.0], [2.0]).lower is None
    assert paired_ratio([3.0], [2.0]).ratio == pytest.approx(1.5)
