"""From what a drafter computed to the frames that say so. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from cluster.wire import Blocks, Lost
from drafter_service.drafter import DraftOutcome
from drafter_service.sessions import LostSession


def blocks_by_lane(
    outcome: DraftOutcome, *, drafter_id: str, draft_s: float
) -> list[tuple[str, Blocks]]:
    """One `Blocks` frame per lane that gets any.

    Args:
        draft_s: seconds the batch spent in this replica, queueing included.
    """
    block = outcome.block
    if block is None:
        return []
    rows_of: defaultdict[str, list[int]] = defaultdict(list)
    for row, drafted in enumerate(outcome.drafted):
        rows_of[drafted.lane_id].append(row)
    q_row = np.cumsum(block.has_q) - 1  # row of q_ids that belongs to a session with q
    frames = []
    for lane_id, rows in rows_of.items():
        drafted_here = [outcome.drafted[row] for row in rows]
        with_q = [int(q_row[row]) for row in rows if block.has_q[row]]
        frame = Blocks(
            drafter_id=drafter_id,
            rid=np.array([d.rid for d in drafted_here], np.int64),
            epoch=np.array([d.epoch for d in drafted_here], np.int32),
            anchor=np.array([d.anchor for d in drafted_here], np.int32),
            digest=np.array([d.digest for d in drafted_here], np.uint64),
            num_draft=outcome.num_draft[rows],
            ids=block.ids[rows],
            confidence=block.confidence[rows],
            has_q=block.has_q[rows],
            q_ids=block.q_ids[with_q],
            q_probs=block.q_probs[with_q],
            draft_s=draft_s,
        )
        frames.append((lane_id, frame))
    return frames


def lost_by_owner(lost: Iterable[LostSession]) -> list[tuple[int, Lost]]:
    """`Lost` frames, each with the number of the verifier stream that owned its sessions."""
    groups: defaultdict[tuple[int, str, str], list[LostSession]] = defaultdict(list)
    for session in lost:
        groups[session.owner, session.lane_id, session.reason].append(session)
    return [
        (
            owner,
            Lost(
                lane_id=lane_id,
                rid=np.array([s.rid for s in sessions], np.int64),
                epoch=np.array([s.epoch for s in sessions], np.int32),
                reason=reason[:1024],
            ),
        )
        for (owner, lane_id, reason), sessions in groups.items()
    ]
