"""Means over rows."""

from __future__ import annotations

import pytest

from router.row_means import RowMeans


def test_the_means_follow_what_rows_cost_and_give() -> None:
    means = RowMeans()
    for _ in range(200):
        means.learn(8, 8 * 6, 8 * 3)
    assert (means.num_tokens, means.num_emitted) == pytest.approx((6, 3), rel=0.02)
    for _ in range(200):
        means.learn(2, 2 * 2, 2 * 1)
    assert (means.num_tokens, means.num_emitted) == pytest.approx((2, 1), rel=0.02)


def test_a_step_without_drafting_rows_says_nothing() -> None:
    means = RowMeans()
    before = vars(means).copy()
    means.learn(0, 0, 0)
    assert vars(means) == before
