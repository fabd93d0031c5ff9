"""What is remembered of earlier blocks."""

from __future__ import annotations

import numpy as np
import pytest

from router.policies.memory import SurvivalMemory
from tests.router.policies.steps import make_step


def test_the_last_block_of_each_request_cut_to_what_it_has_now() -> None:
    memory = SurvivalMemory()
    memory.put(make_step([[0.9, 0.8, 0.7], [0.5, 0.4, 0.3]], rids=[7, 3]))
    memory.put(make_step([[0.6, 0.5, 0.4]], rids=[7]))
    now = make_step(np.zeros((2, 3)), rids=[3, 7], num_drafts=[2, 3])
    assert memory.expected(now) == pytest.approx(np.array([[0.5, 0.4, 0.0], [0.6, 0.5, 0.4]]))


def test_new_requests_are_expected_to_do_as_the_others_did() -> None:
    memory = SurvivalMemory()
    new = make_step(np.zeros((1, 3)), rids=[99])
    assert memory.expected(new)[0] == pytest.approx([0.75, 0.75**2, 0.75**3])
    for _ in range(300):
        memory.put(make_step([[0.9, 0.6, 0.1], [0.7, 0.2, 0.1]]))
    assert memory.expected(new)[0] == pytest.approx([0.8, 0.4, 0.1], abs=0.01)
    for _ in range(1000):
        memory.put(make_step([[0.3, 0.2, 0.1], [0.3, 0.2, 0.1]]))
    assert memory.expected(new)[0] == pytest.approx([0.3, 0.2, 0.1], abs=0.02)


def test_rows_without_a_block_forget_nothing() -> None:
    memory = SurvivalMemory()
    memory.put(make_step([[0.9, 0.8], [0.5, 0.4]]))
    memory.put(make_step(np.zeros((2, 2)), num_drafts=[0, 0]))
    memory.put(make_step([[0.3, 0.2], [0.0, 0.0]], num_drafts=[2, 0]))
    now = make_step(np.zeros((2, 2)))
    assert memory.expected(now) == pytest.approx(np.array([[0.3, 0.2], [0.5, 0.4]]))


def test_a_block_without_a_chance_is_remembered_as_such() -> None:
    memory = SurvivalMemory()
    memory.put(make_step([[0.0, 0.0]], num_drafts=[2]))
    assert memory.expected(make_step([[0.9, 0.9]])).tolist() == [[0.0, 0.0]]


def test_blocks_longer_than_any_before() -> None:
    """Behind what was seen: the mean, never above the last value that was seen."""
    memory = SurvivalMemory()
    memory.put(make_step([[0.4]], rids=[1]))
    memory.put(make_step([[0.9, 0.8, 0.7]], rids=[2]))
    wide = memory.expected(make_step(np.zeros((2, 5)), rids=[1, 2]))
    assert (np.diff(wide, axis=1) <= 0).all()
    assert wide[0, 0] == pytest.approx(0.4)
    assert 0 < wide[0, 4] <= wide[0, 1] <= 0.4
    assert wide[1, :3] == pytest.approx([0.9, 0.8, 0.7])


def test_thousands_of_requests_and_long_lives() -> None:
    rng = np.random.default_rng(0)
    memory = SurvivalMemory()
    blocks = np.sort(rng.random((3000, 4)), axis=1)[:, ::-1]
    rids = np.arange(3000) + (5 << 31)
    memory.put(make_step(blocks, rids=rids))
    order = rng.permutation(3000)
    found = memory.expected(make_step(np.zeros((3000, 4)), rids=rids[order]))
    assert found == pytest.approx(blocks[order], abs=1e-6)


def test_of_two_requests_that_share_a_slot_the_older_counts_as_new() -> None:
    memory = SurvivalMemory()
    memory.put(make_step([[0.9]], rids=[5]))
    memory.put(make_step([[0.1]], rids=[5 + (1 << 20)]))
    found = memory.expected(make_step(np.zeros((2, 1)), rids=[5, 5 + (1 << 20)]))
    assert found[1, 0] == pytest.approx(0.1)
    assert found[0, 0] == pytest.approx(memory.mean[0])
    assert 0.5 < found[0, 0] < 0.85
