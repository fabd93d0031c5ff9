"""A batch of a drafter, around what it computes: bookkeeping before, outcome and faults behind.

Rows of sessions that nobody wants a draft of are not computed but kept (`PendingRows`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.wire import I32, Commit, Open, Release
from drafter_service.drafter import Drafted, DraftOutcome, Work
from drafter_service.pending_rows import NewRows, PendingRows
from drafter_service.sampling import Block
from drafter_service.sessions import DraftSession, Key, SessionTable

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Staged:
    """What a batch has to do for one session."""

    session: DraftSession
    rows: list[NewRows] = field(default_factory=list)
    want_draft: bool = False


def advance(
    sessions: SessionTable, work: Sequence[Work], now_s: float, staged: dict[Key, Staged]
) -> None:
    """Do the bookkeeping of a batch, in order, and let idle sessions expire.

    Args:
        staged: takes the sessions that got rows. One that a later frame ended is in there too
            (`is_live` tells).
    """
    for item in work:
        frame = item.frame
        if isinstance(frame, Open):
            sessions.open(frame, item.owner, now_s)
        elif isinstance(frame, Commit):
            _stage(sessions, frame, item.owner, now_s, staged)
        elif isinstance(frame, Release):
            sessions.release(frame.lane_id, frame.rid.tolist(), item.owner)
        else:
            sessions.hang_up(item.owner)
    sessions.expire(now_s)


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What a drafter made of a batch; sessions that it lost are not in here."""

    sessions: Sequence[DraftSession]
    block: Block | None
    """Row by row for ``sessions``; None if there are none."""
    num_draft: I32
    """[S]"""


def run_batch(
    sessions: SessionTable,
    pending: PendingRows,
    work: Sequence[Work],
    now_s: float,
    compute: Callable[[Sequence[Staged]], Computed],
    *,
    window: int | None = None,
) -> DraftOutcome:
    """`drafter_service.drafter.Drafter.run`, given how new rows are taken in and blocks drafted.

    An error while computing loses the sessions of the batch and nothing else.

    Args:
        pending: rows that wait; those of sessions that want a draft are handed to ``compute`` with
            the new ones, new ones of the others wait in their turn.
        compute: called with the sessions whose rows are to be computed now, in order and without
            a hole, and which are still live.
        window: rows that lie further than this behind a session's end are never needed again.
    """
    staged: dict[Key, Staged] = {}
    due: list[Staged] = []
    try:
        advance(sessions, work, now_s, staged)
        pending.forget(lambda session: is_live(sessions, session))
        live = [one for one in staged.values() if is_live(sessions, one.session)]
        _take_due(sessions, pending, live, due, window)
        done = compute(due)
    except Exception:  # an allocation that failed, say: other sessions and the replica live on
        logger.exception("a draft batch of %d sessions failed", len(staged))
        done = Computed(sessions=(), block=None, num_draft=np.zeros(0, np.int32))
        for session in {id(one.session): one.session for one in (*staged.values(), *due)}.values():
            sessions.counters.failed += 1
            sessions.lose(session, "error while drafting")
    return DraftOutcome(
        drafted=tuple(map(_describe, done.sessions)),
        block=done.block,
        num_draft=done.num_draft,
        lost=sessions.take_lost(),
    )


def _take_due(
    sessions: SessionTable,
    pending: PendingRows,
    staged: Sequence[Staged],
    due: list[Staged],
    window: int | None,
) -> None:
    """Sort out what is computed now, into ``due``, and what waits."""
    for one in staged:
        if one.want_draft:
            waited = pending.take(one.session)
            sessions.counters.rows_caught_up += sum(len(rows.ids) for rows in waited)
            one.rows[:0] = waited
            due.append(one)
            continue
        first_needed = 0 if window is None else max(one.session.covered - window, 0)
        pending.put(one.session, one.rows, first_needed=first_needed)
        sessions.trim(one.session, first_needed)
    for session, rows in pending.take_overdue():
        sessions.counters.rows_overdue += sum(len(one.ids) for one in rows)
        due.append(Staged(session=session, rows=rows))


def is_live(sessions: SessionTable, session: DraftSession) -> bool:
    """Whether the table still holds this very session."""
    return sessions.get(session.lane_id, session.rid) is session


def to_tensor(features: NDArray[Any]) -> Tensor:
    """Rows as they crossed the wire: ``f4``, ``f2``, or ``u2`` for the bits of bfloat16."""
    rows = torch.from_numpy(features.copy())
    return rows.view(torch.bfloat16) if features.dtype == np.uint16 else rows


def _describe(session: DraftSession) -> Drafted:
    """The state of the session that a block was drafted for."""
    return Drafted(
        lane_id=session.lane_id,
        rid=session.rid,
        epoch=session.epoch,
        anchor=session.covered,
        digest=session.digest,
    )


def _stage(
    sessions: SessionTable, frame: Commit, owner: int, now_s: float, staged: dict[Key, Staged]
) -> None:
    """Advance the sessions of one commit and note their rows."""
    features_TD = to_tensor(frame.features)
    stops = np.cumsum(frame.num_rows)
    for index, stop in enumerate(stops.tolist()):
        start = stop - int(frame.num_rows[index])
        key = (frame.lane_id, int(frame.rid[index]))
        first = int(frame.first_position[index])
        ids = frame.ids[start:stop].tolist()
        session = sessions.commit(
            key=key,
            epoch=int(frame.epoch[index]),
            owner=owner,
            first_position=first,
            ids=ids,
            digest_after=int(frame.digest[index]),
            now_s=now_s,
        )
        if session is None:
            continue
        one = staged.get(key)
        if one is None or one.session is not session:
            one = staged[key] = Staged(session=session)
        one.rows.append(
            NewRows(
                session=session,
                first_position=first,
                ids=tuple(ids),
                features=features_TD[start:stop],
            )
        )
        one.want_draft = bool(frame.want_draft[index])
