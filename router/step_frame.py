"""Packing of one `Step` frame from plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from cluster.sparse import SparseQ
from cluster.wire import F32, I32, Admission, Rebind, Step
from router.lane_request import LaneRequest

_NO_DRAFTER: Final = ("", "")


class PlannedRow(NamedTuple):
    """One verify row: how much of its block goes, and whether the next one is asked for."""

    request: LaneRequest
    num_draft: int
    want_draft: bool
    ahead: bool = False
    """The step in the air emits its anchor, the token behind the request's present one."""


def pack_step(
    rows: Sequence[PlannedRow],
    *,
    lane_epoch: int,
    step_id: int,
    admissions: Sequence[Admission],
    rebinds: Sequence[Rebind],
    releases: Sequence[int],
    prefill_budget: int,
) -> Step:
    """Concatenate the rows' anchors, draft prefixes and sparse q."""
    draft_ids: list[int] = []
    q_rows: list[SparseQ] = []
    has_q = np.zeros(len(rows), np.uint8)
    for r, (request, n, _, _) in enumerate(rows):
        block = request.block
        if block is None or n == 0:
            continue
        draft_ids += block.ids[:n]
        if block.q is not None and needs_q(request):
            has_q[r] = 1
            q_rows.append(SparseQ(ids=block.q.ids[:n], probs=block.q.probs[:n]))
    q_ids, q_probs = _stack_q(q_rows)
    requests = [row.request for row in rows]
    return Step(
        lane_epoch=lane_epoch,
        step_id=step_id,
        admissions=tuple(admissions),
        rebinds=tuple(rebinds),
        releases=np.array(releases, np.int64),
        prefill_budget=prefill_budget,
        rid=np.array([request.rid for request in requests], np.int64),
        anchor=np.array([row.request.anchor + row.ahead for row in rows], np.int32),
        digest=np.array([request.digest for request in requests], np.uint64),
        num_draft=np.array([row.num_draft for row in rows], np.int32),
        want_draft=np.array([row.want_draft for row in rows], np.uint8),
        draft_ids=np.array(draft_ids, np.int32),
        has_q=has_q,
        q_ids=q_ids,
        q_probs=q_probs,
    )


def admission_of(request: LaneRequest) -> Admission:
    """The request as the verifier first sees it, or sees it again after a fault."""
    drafter_id, address = _place(request)
    return Admission(
        rid=request.rid,
        ids=np.array(request.ids, np.int32),
        num_prompt=request.num_prompt,
        max_new_tokens=request.max_new_tokens,
        stop_ids=np.array(request.stop_ids, np.int32),
        sampling=request.sampling,
        drafter_id=drafter_id,
        drafter_address=address,
        session_epoch=request.session_epoch,
        want_draft=bool(drafter_id) and request.asks_first,
        constraint_kind=request.constraint_kind,
        constraint=request.constraint,
        adapter=request.adapter,
    )


def rebind_of(request: LaneRequest) -> Rebind:
    """Open the session of a request anew at its present drafter. Its verify row, which goes in the
    same step, asks for the block: one at the old anchor would come too late."""
    drafter_id, address = _place(request)
    return Rebind(
        rid=request.rid,
        drafter_id=drafter_id,
        drafter_address=address,
        session_epoch=request.session_epoch,
        want_draft=False,
    )


def needs_q(request: LaneRequest) -> bool:
    """Only rejection sampling above temperature 0 looks at q."""
    return request.sampling.mode == "rejection" and request.sampling.temperature > 0


def _place(request: LaneRequest) -> tuple[str, str]:
    drafter = request.drafter
    return (drafter.drafter_id, drafter.address) if drafter else _NO_DRAFTER


def _stack_q(q_rows: Sequence[SparseQ]) -> tuple[I32, F32]:
    """Stack q of different widths K: narrow rows get places of probability 0 (absent means 0)."""
    if not q_rows:
        return np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32)
    width = max(q.ids.shape[1] for q in q_rows)
    ids = np.concatenate([_widen_ids(q.ids, width) for q in q_rows])
    missing = [width - q.ids.shape[1] for q in q_rows]
    probs = [np.pad(q.probs, ((0, 0), (0, n))) for q, n in zip(q_rows, missing, strict=True)]
    return ids.astype(np.int32), np.concatenate(probs).astype(np.float32)


def _widen_ids(ids: I32, width: int) -> I32:
    """Fill rows up to ``width`` with the smallest ids that they do not hold (ids stay unique)."""
    missing = width - ids.shape[1]
    # Of the ids below ``width`` a row holds at most ids.shape[1], so enough are free.
    free = [np.setdiff1d(np.arange(width), row)[:missing] for row in ids]
    return np.concatenate([ids, np.array(free, ids.dtype).reshape(len(ids), missing)], axis=1)
