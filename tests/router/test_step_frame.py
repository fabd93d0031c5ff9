"""Packing of a step's rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from cluster.sparse import SparseQ, check_draft
from cluster.wire import Step, decode, encode
from router.blocks import DraftBlock
from router.lane_request import LaneRequest
from router.step_frame import PlannedRow, admission_of, pack_step
from tests.frames import make_sampling


def request(rid: int, block: DraftBlock | None, **sampling: Any) -> LaneRequest:
    made = LaneRequest(
        rid=rid,
        ids=[1, 2, 3],
        num_prompt=2,
        max_new_tokens=10,
        stop_ids=(4,),
        sampling=make_sampling(**sampling),
        draft=True,
    )
    made.block = block
    return made


def block(ids: tuple[int, ...], width: int) -> DraftBlock:
    support = np.array([[token, *range(20, 20 + width - 1)] for token in ids], np.int32)
    probs = np.full(support.shape, 1 / width, np.float32)
    q = SparseQ(ids=support, probs=probs)
    confidence = np.full(len(ids), 0.5)
    return DraftBlock(rid=0, epoch=0, anchor=2, digest=0, ids=ids, confidence=confidence, q=q)


def pack(*planned: tuple[LaneRequest, int]) -> Step:
    rows = [PlannedRow(request=r, num_draft=n, want_draft=True) for r, n in planned]
    step = pack_step(
        rows, lane_epoch=1, step_id=2, admissions=[], rebinds=[], releases=[5], prefill_budget=3
    )
    assert decode(encode(step)) == step, "it is well formed"
    return step


def test_q_goes_only_where_rejection_sampling_reads_it() -> None:
    rejection = {"mode": "rejection", "temperature": 1.0}
    step = pack(
        (request(1, block((7, 8, 9), 3), **rejection), 2),
        (request(2, block((7, 8, 9), 3)), 1),
        (request(3, block((7, 8, 9), 3), mode="rejection"), 3),
        (request(4, None, **rejection), 0),
    )
    assert step.has_q.tolist() == [1, 0, 0, 0]
    assert step.draft_ids.tolist() == [7, 8, 7, 7, 8, 9]
    assert step.q_ids.tolist() == [[7, 20, 21], [8, 20, 21]]


def test_q_of_different_widths_is_widened_without_changing_it() -> None:
    rejection = {"mode": "rejection", "temperature": 1.0}
    step = pack(
        (request(1, block((0, 1, 2), 2), **rejection), 3),
        (request(2, block((7, 8, 9), 5), **rejection), 1),
    )
    assert step.q_ids.shape == (4, 5)
    q = SparseQ(ids=step.q_ids[:3], probs=step.q_probs[:3])
    check_draft((0, 1, 2), q, vocab_size=30)
    assert (q.probs > 0).sum() == 6


def test_admission_of_a_continuation() -> None:
    admission = admission_of(request(1, None))
    assert admission.ids.tolist() == [1, 2, 3]
    assert (admission.num_prompt, admission.max_new_tokens) == (2, 10)
    assert (admission.drafter_id, admission.want_draft) == ("", False)
    assert (admission.constraint_kind, admission.constraint, admission.adapter) == ("", "", "")


def test_admission_of_a_bound_answer() -> None:
    bound = LaneRequest(
        rid=1,
        ids=[1, 2, 3],
        num_prompt=2,
        max_new_tokens=10,
        stop_ids=(4,),
        sampling=make_sampling(),
        draft=True,
        constraint_kind="regex",
        constraint="é+",
        adapter="sql",
    )
    admission = admission_of(bound)
    assert (admission.constraint_kind, admission.constraint) == ("regex", "é+")
    assert admission.adapter == "sql"
    assert (admission.ids.tolist(), admission.num_prompt) == ([1, 2, 3], 2)
