"""Builders of frames: everything empty or plain unless a test says otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from cluster import digest
from cluster.wire import Admission, Blocks, Commit, Hello, Sampling, Step, StepResult


def make_hello(role: str = "router", member_id: str = "router-0", **changes: Any) -> Hello:
    """A member without fingerprints or token."""
    hello = Hello(role=role, member_id=member_id, incarnation=1, model="", drafter="", token="")
    return dataclasses.replace(hello, **changes)


def make_sampling(**changes: Any) -> Sampling:
    """Greedy, coupled mode, no penalties."""
    sampling = Sampling(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        bias_ids=np.zeros(0, np.int32),
        bias_values=np.zeros(0, np.float32),
        seed=0,
        mode="coupled",
        logprobs=False,
    )
    return dataclasses.replace(sampling, **changes)


def make_admission(rid: int, ids: Sequence[int], **changes: Any) -> Admission:
    """A fresh request of up to 8 greedy tokens without a drafter."""
    admission = Admission(
        rid=rid,
        ids=np.asarray(ids, np.int32),
        num_prompt=len(ids),
        max_new_tokens=8,
        stop_ids=np.zeros(0, np.int32),
        sampling=make_sampling(),
        drafter_id="",
        drafter_address="",
        session_epoch=0,
        want_draft=False,
    )
    return dataclasses.replace(admission, **changes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One verify row, as `make_step` takes it."""

    rid: int
    ids: Sequence[int]
    """All committed ids: anchor and digest follow from them."""
    draft_ids: Sequence[int] = ()
    want_draft: bool = False


def make_step(rows: Sequence[Row] = (), **changes: Any) -> Step:
    """A step with these rows (no q) and a prefill budget of 64."""
    step = Step(
        lane_epoch=0,
        step_id=0,
        admissions=(),
        rebinds=(),
        releases=np.zeros(0, np.int64),
        prefill_budget=64,
        rid=np.array([row.rid for row in rows], np.int64),
        anchor=np.array([len(row.ids) - 1 for row in rows], np.int32),
        digest=np.array([digest.of(row.ids) for row in rows], np.uint64),
        num_draft=np.array([len(row.draft_ids) for row in rows], np.int32),
        want_draft=np.array([row.want_draft for row in rows], np.uint8),
        draft_ids=np.array([token for row in rows for token in row.draft_ids], np.int32),
        has_q=np.zeros(len(rows), np.uint8),
        q_ids=np.zeros((0, 0), np.int32),
        q_probs=np.zeros((0, 0), np.float32),
    )
    return dataclasses.replace(step, **changes)


def make_result(**changes: Any) -> StepResult:
    """A step in which nothing happened."""
    result = StepResult(
        lane_epoch=0,
        step_id=0,
        rid=np.zeros(0, np.int64),
        num_accepted=np.zeros(0, np.int32),
        num_emitted=np.zeros(0, np.int32),
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        anchor=np.zeros(0, np.int32),
        digest=np.zeros(0, np.uint64),
        finish=np.zeros(0, np.uint8),
        failures=(),
        unbound=np.zeros(0, np.int64),
        num_real_tokens=0,
        num_padded_tokens=0,
        num_prefill_tokens=0,
        sum_context=0,
        step_s=1e-6,
        free_kv_blocks=0,
        pending_prefill_tokens=0,
    )
    return dataclasses.replace(result, **changes)


def make_commit(**changes: Any) -> Commit:
    """A commit of no session."""
    commit = Commit(
        lane_id="router-0",
        rid=np.zeros(0, np.int64),
        epoch=np.zeros(0, np.int32),
        first_position=np.zeros(0, np.int32),
        num_rows=np.zeros(0, np.int32),
        digest=np.zeros(0, np.uint64),
        want_draft=np.zeros(0, np.uint8),
        ids=np.zeros(0, np.int32),
        features=np.zeros((0, 0), np.float32),
    )
    return dataclasses.replace(commit, **changes)


def make_blocks(
    rid: int, epoch: int, ids: Sequence[int], draft_ids: Sequence[int], **changes: Any
) -> Blocks:
    """One session's block behind the committed ``ids``, without q, confidence 0.9."""
    blocks = Blocks(
        drafter_id="drafter-0",
        rid=np.array([rid], np.int64),
        epoch=np.array([epoch], np.int32),
        anchor=np.array([len(ids) - 1], np.int32),
        digest=np.array([digest.of(ids)], np.uint64),
        num_draft=np.array([len(draft_ids)], np.int32),
        ids=np.array([draft_ids], np.int32).reshape(1, len(draft_ids)),
        confidence=np.full((1, len(draft_ids)), 0.9, np.float32),
        has_q=np.zeros(1, np.uint8),
        q_ids=np.zeros((0, len(draft_ids), 0), np.int32),
        q_probs=np.zeros((0, len(draft_ids), 0), np.float32),
        draft_s=0.0,
    )
    return dataclasses.replace(blocks, **changes)
