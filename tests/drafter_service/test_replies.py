"""Frames to lanes and verifiers hold exactly the rows that are theirs."""

from __future__ import annotations

import numpy as np

from cluster.wire import decode, encode
from drafter_service.drafter import Drafted, DraftOutcome
from drafter_service.replies import blocks_by_lane, lost_by_owner
from drafter_service.sampling import Block
from drafter_service.sessions import LostSession


def test_blocks_are_split_by_lane_with_their_own_q() -> None:
    lanes = ["a", "b", "a", "b"]
    has_q = np.array([1, 0, 1, 1], np.uint8)
    block = Block(
        ids=np.arange(8, dtype=np.int32).reshape(4, 2),
        confidence=np.linspace(0, 1, 8, dtype=np.float32).reshape(4, 2),
        q_ids=np.arange(18, dtype=np.int32).reshape(3, 2, 3),
        q_probs=np.full((3, 2, 3), 1 / 3, np.float32),
        has_q=has_q,
    )
    drafted = tuple(
        Drafted(lane_id=lane, rid=10 + i, epoch=i, anchor=20 + i, digest=30 + i)
        for i, lane in enumerate(lanes)
    )
    outcome = DraftOutcome(
        drafted=drafted, block=block, num_draft=np.array([2, 2, 1, 2], np.int32), lost=()
    )
    frames = dict(blocks_by_lane(outcome, drafter_id="d", draft_s=0.5))
    assert frames.keys() == {"a", "b"}
    a, b = frames["a"], frames["b"]
    assert decode(encode(a)) == a
    assert (a.rid.tolist(), a.epoch.tolist(), a.anchor.tolist()) == ([10, 12], [0, 2], [20, 22])
    assert (a.num_draft.tolist(), a.digest.tolist()) == ([2, 1], [30, 32])
    assert a.ids.tolist() == [[0, 1], [4, 5]]
    assert np.array_equal(a.q_ids, block.q_ids[[0, 1]])
    assert (b.rid.tolist(), b.has_q.tolist()) == ([11, 13], [0, 1])
    assert np.array_equal(b.q_ids, block.q_ids[[2]])
    assert np.array_equal(b.confidence, block.confidence[[1, 3]])
    assert (b.drafter_id, b.draft_s) == ("d", 0.5)


def test_nothing_drafted_says_nothing() -> None:
    outcome = DraftOutcome(drafted=(), block=None, num_draft=np.zeros(0, np.int32), lost=())
    assert blocks_by_lane(outcome, drafter_id="d", draft_s=0.0) == []


def test_losses_are_grouped_by_stream_lane_and_reason() -> None:
    lost = [
        LostSession(lane_id=lane, rid=rid, epoch=rid, owner=owner, reason=reason)
        for lane, rid, owner, reason in (
            ("a", 1, 7, "gap"),
            ("a", 2, 7, "gap"),
            ("b", 3, 7, "gap"),
            ("a", 4, 8, "gap"),
            ("a", 5, 7, "x" * 2000),
        )
    ]
    frames = lost_by_owner(lost)
    assert [(owner, f.lane_id, f.rid.tolist()) for owner, f in frames] == [
        (7, "a", [1, 2]),
        (7, "b", [3]),
        (8, "a", [4]),
        (7, "a", [5]),
    ]
    for _, frame in frames:
        assert decode(encode(frame)) == frame
