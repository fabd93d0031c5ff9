"""Rounds in which a gate decides, and first rounds."""

from __future__ import annotations

import pytest

from router.gate_rhythm import GateRhythm


def known(num_rows: int, round_s: float) -> GateRhythm:
    rhythm = GateRhythm()
    rhythm.round_s = round_s
    while rhythm.is_new(num_rows):
        rhythm.begin(num_rows)
    rhythm.tick(num_rows)
    return rhythm


@pytest.mark.parametrize(
    ("num_rows", "round_s", "share"),
    [(1, 0.1, 1.0), (1, 0.01, 0.5), (64, 0.1, 0.25), (9, 1e-3, 0.25)],
)
def test_a_share_of_rounds_decides(num_rows: int, round_s: float, share: float) -> None:
    rhythm = known(num_rows, round_s)
    due = [rhythm.tick(num_rows) for _ in range(400)]
    assert sum(due) / 400 == pytest.approx(share, abs=0.02)
    for group in (due[::2], due[1::2], due[::3]):
        assert sum(group) / len(group) == pytest.approx(share, abs=0.05), "no group is left out"


def test_another_load_is_decided_at_once() -> None:
    rhythm = known(64, 0.1)
    for num in (1, 64):
        while rhythm.is_new(num):
            rhythm.begin(num)
    for num in (1, 64, 1, 64):
        assert rhythm.tick(num)


def test_a_load_begins_with_a_few_rounds_of_which_one_is_plain() -> None:
    rhythm = GateRhythm()
    plain = []
    while rhythm.is_new(6):
        assert rhythm.tick(6)
        plain.append(rhythm.begin(6))
    assert plain == [False] * 4 + [True]
    assert not rhythm.is_new(7), "the same within a factor of two"
    assert rhythm.is_new(8)
