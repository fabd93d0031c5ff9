"""Reliability tables against their own words, one sample at a time."""

from __future__ import annotations

import numpy as np
import pytest

from router.reliability import ReliabilityTables


def tables(memory: float = 100.0, num_cells: int = 2) -> ReliabilityTables:
    return ReliabilityTables(num_cells=num_cells, num_bins=4, low=0.0, high=1.0, memory=memory)


def add(t: ReliabilityTables, *samples: tuple[int, float, bool]) -> None:
    cells, values, hits = zip(*samples, strict=True)
    t.add(np.array(cells), np.array(values), np.array(hits))


def test_each_sample_lies_in_its_bin_the_ends_included() -> None:
    t = tables()
    add(t, (0, 0.0, True), (0, 0.3, False), (0, 1.0, True), (1, 0.5, True))
    assert t.weights.tolist() == [[1, 1, 0, 1], [0, 0, 1, 0]]
    assert t.hits.tolist() == [[1, 0, 0, 1], [0, 0, 1, 0]]
    assert t.values.tolist() == [[0, 0.3, 0, 1], [0, 0, 0.5, 0]]


def test_means_and_expected_error() -> None:
    t = tables()
    add(t, (0, 0.9, True), (0, 0.9, False), (0, 0.1, False), (0, 0.1, False))
    promised, came_true = t.means()
    assert promised.tolist() == pytest.approx([0.5, 0.0])
    assert came_true.tolist() == [0.25, 0.0]
    assert t.expected_error().tolist() == pytest.approx([0.5 * 0.4 + 0.5 * 0.1, 0.0])


def test_errors_of_opposite_sign_do_not_cancel_between_bins() -> None:
    t = tables()
    add(t, (0, 0.9, False), (0, 0.1, True))
    assert t.means()[0][0] == pytest.approx(t.means()[1][0])
    assert t.expected_error()[0] == pytest.approx(0.9)


def test_a_cell_forgets_by_its_own_samples_only() -> None:
    t = tables(memory=10.0)
    add(t, (0, 0.1, True), (1, 0.1, True))
    for _ in range(5):
        add(t, (0, 0.9, False))
    assert t.weights[0, 0] == pytest.approx(0.9**5)
    assert t.weights[1, 0] == 1.0
    for _ in range(1000):
        add(t, (0, 0.9, False))
    assert t.weights[0].sum() == pytest.approx(10.0)


def test_a_cell_without_samples_keeps_what_it_has_whoever_else_gets_some() -> None:
    t = tables(memory=4.0, num_cells=5)
    add(t, *((cell, 0.6, True) for cell in range(5)))
    add(t, (1, 0.1, False), (3, 0.9, False), (3, 0.9, True))
    keep = 0.75
    assert t.weights[:, 2].tolist() == [1, keep, 1, keep**2, 1]
    assert t.weights.sum(axis=1).tolist() == [1, 1 + keep, 1, 2 + keep**2, 1]
    assert t.hits.sum(axis=1).tolist() == [1, keep, 1, 1 + keep**2, 1]


def test_no_samples_change_nothing() -> None:
    t = tables()
    add(t, (1, 0.6, True))
    before = t.weights.copy()
    t.add(np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.bool_))
    assert (t.weights == before).all()
