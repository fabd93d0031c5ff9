"""Curves of what blocks are worth: levels, shrinkage, forgetting, and what promises come to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from router.blocks import DraftBlock
from router.draft_worth import AS_VERIFIED, LEVELS, DraftWorth, Worth, down_to
from router.lane_request import LaneRequest
from router.recalibration import Recalibrator
from tests.frames import make_sampling


def make_worth() -> DraftWorth:
    return DraftWorth(Recalibrator(min_samples=np.inf))


def make_request(rid: int, confidence: list[float] | None = None, **sampling: Any) -> LaneRequest:
    request = LaneRequest(
        rid=rid,
        ids=[1, 2, 3],
        num_prompt=3,
        max_new_tokens=100,
        stop_ids=(),
        sampling=make_sampling(**sampling),
        draft=True,
    )
    if confidence is not None:
        request.block = DraftBlock(
            rid=rid,
            epoch=0,
            anchor=2,
            digest=0,
            ids=(1,) * len(confidence),
            confidence=np.array(confidence),
            q=None,
        )
    return request


def see(worth: DraftWorth, requests: list[LaneRequest], verified: int = 0, times: int = 1) -> None:
    for _ in range(times):
        worth.see(requests, np.full(len(requests), verified))


def test_a_block_at_each_level() -> None:
    worth, request = make_worth(), make_request(1, [0.8, 0.5, 0.5])
    see(worth, [request], verified=2, times=800)
    accepted, verified = (figure[0] for figure in worth.expect(worth.rows([request])))
    wanted = [sum(a for a in (0.8, 0.4, 0.2) if a > level) for level in LEVELS]
    np.testing.assert_allclose(accepted[:AS_VERIFIED], wanted, atol=0.01)
    assert verified[0] == pytest.approx(3, abs=0.01)
    assert verified[5] == pytest.approx(1, abs=0.01)
    assert accepted[AS_VERIFIED] == pytest.approx(1.2, abs=0.01)
    assert verified[AS_VERIFIED] == pytest.approx(2, abs=0.01)


def test_shorter_blocks_and_none_at_all_count_as_they_are() -> None:
    worth = make_worth()
    requests = [make_request(1, [0.9, 0.9]), make_request(2, [])]
    see(worth, requests, times=200)
    verified = worth.expect(worth.rows(requests)).verified[:, 0]
    assert verified[0] > 1.5
    assert verified[1] < 0.5


def test_a_new_request_counts_as_the_others_of_its_regime_do() -> None:
    worth = make_worth()
    see(worth, [make_request(1, [0.1] * 4), make_request(2, [0.9] * 4)], times=100)
    mean = 0.5 * (sum(0.1**k for k in range(1, 5)) + sum(0.9**k for k in range(1, 5)))
    new, other = make_request(3), make_request(4, temperature=1.0)
    accepted = worth.expect(worth.rows([new, other])).accepted[:, 0]
    assert accepted[0] == pytest.approx(mean, rel=0.05)
    assert accepted[1] > 2.5, "of another regime, of which nothing is known: hopeful"


def test_own_blocks_tell_requests_apart_and_fade_while_there_are_none() -> None:
    worth = make_worth()
    easy, hard = make_request(1, [0.95] * 4), make_request(2, [0.1] * 4)
    see(worth, [easy, hard], times=50)
    rows = worth.rows([easy, hard])
    before = worth.expect(rows).accepted[:, 0]
    assert before[0] > 4 * before[1]
    worth.pass_over([easy, hard], num_rounds=400)
    after = worth.expect(rows).accepted[:, 0]
    assert after[0] == pytest.approx(after[1], rel=0.02)


def test_a_block_that_did_not_come_was_worth_nothing() -> None:
    worth, request = make_worth(), make_request(1, [0.9] * 4)
    see(worth, [request], times=100)
    for _ in range(200):  # the mean of the regime is slower than the request
        worth.miss([request])
    assert worth.expect(worth.rows([request])).accepted[0, 0] < 0.2


def test_promises_that_are_not_kept_are_discounted_place_by_place() -> None:
    """The first draft is always right, the second never, whatever the drafter says."""
    worth, requests = make_worth(), [make_request(r, [0.95] * 3) for r in range(8)]
    rids = [request.rid for request in requests]
    for _ in range(100):
        promised = worth.see(requests, np.full(8, 3))
        worth.judge(rids, promised, np.ones(8, np.int64))
    accepted, verified = worth.expect(worth.rows(requests))
    assert accepted[0, 0] == pytest.approx(1.0, abs=0.2)
    assert verified[0, 0] == pytest.approx(3.0, abs=0.05), "what is verified follows the promise"
    mean, honesty = worth.mean("greedy")
    assert mean == pytest.approx(1.0, abs=0.2)
    assert honesty < 0.5


def test_a_regime_is_known_after_enough_blocks() -> None:
    worth, request = make_worth(), make_request(1, [0.5] * 4)
    assert not worth.is_known([request])
    see(worth, [request], times=96)
    assert worth.is_known([request])
    assert not worth.is_known([make_request(2, temperature=1.0)])


def test_levels_between_those_that_are_kept() -> None:
    curve = np.array([[4.0, 3.0, 2.5, 2.0, 1.5, 1.0, 0.8, 0.6, 0.4, 0.2]])
    found = down_to(Worth(curve, 2 * curve), np.array([[0.0, 0.1, 0.15, 0.9, 0.95, 1.0, 3.0]]))
    np.testing.assert_allclose(found.accepted, [[4.0, 3.0, 2.75, 0.2, 0.1, 0.0, 0.0]])
    np.testing.assert_allclose(found.verified, 2 * found.accepted)
