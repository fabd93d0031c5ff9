"""One example of every frame, with something in each of its fields."""

from __future__ import annotations

from typing import Any

import numpy as np

from cluster import wire
from cluster.wire import Frame
from tests.frames import (
    Row,
    make_admission,
    make_blocks,
    make_commit,
    make_hello,
    make_result,
    make_sampling,
    make_step,
)


def i32(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int32)


def i64(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int64)


def f32(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values, np.float32)


def u8(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.uint8)


def u64(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.uint64)


SAMPLING = make_sampling(
    temperature=0.7,
    seed=(1 << 64) - 1,
    bias_ids=i32(3, 5),
    bias_values=f32(-1.5, 2.0),
    mode="rejection",
)
STEP = make_step(
    [Row(rid=1, ids=[4, 5], draft_ids=[6, 7], want_draft=True), Row(rid=2, ids=[8])],
    lane_epoch=1 << 60,
    admissions=(
        make_admission(
            3,
            [1, 2],
            sampling=SAMPLING,
            drafter_address="127.0.0.1:1",
            constraint_kind="choice",
            constraint='["yes", "né"]',
            adapter="sql",
        ),
    ),
    rebinds=(
        wire.Rebind(rid=2, drafter_id="d", drafter_address="h:1", session_epoch=4, want_draft=True),
    ),
    releases=i64(9),
    has_q=u8(1, 0),
    q_ids=np.array([[6, 1], [7, 2]], np.int32),
    q_probs=np.array([[0.5, 0.5], [1.0, 0.0]], np.float32),
)
RESULT = make_result(
    rid=i64(1, 3),
    num_accepted=i32(1, 0),
    num_emitted=i32(2, 1),
    token_ids=i32(6, 9, 4),
    logprobs=f32(-0.5, -2.0, 0.0),
    anchor=i32(3, 2),
    digest=u64(1, (1 << 64) - 1),
    finish=u8(0, 2),
    failures=(wire.Failure(rid=2, code="StaleFrame", message="gone"),),
    unbound=i64(1),
    num_pairs=77,
    num_cached_tokens=48,
    num_preempted=2,
)
COMMIT = make_commit(
    rid=i64(1, 2),
    epoch=i32(0, 1),
    first_position=i32(4, 0),
    num_rows=i32(1, 2),
    digest=u64(5, 6),
    want_draft=u8(1, 0),
    ids=i32(1, 2, 3),
    features=np.arange(6, dtype=np.uint16).reshape(3, 2),
)
BLOCKS = make_blocks(
    1,
    2,
    [3, 4],
    [5, 6],
    has_q=u8(1),
    q_ids=np.array([[[5, 1], [6, 1]]], np.int32),
    q_probs=np.array([[[0.75, 0.25], [1.0, 0.0]]], np.float32),
)
EXAMPLES: tuple[Frame, ...] = (
    make_hello(token="secret", incarnation=1 << 61),
    wire.Refused(code="LeaseError", message="no", fatal=True),
    wire.Ping(nonce=7),
    wire.Pong(nonce=7),
    wire.Drain(deadline_s=2.5),
    wire.Acquire(lane_id="router-0"),
    STEP,
    wire.Lease(
        lane_epoch=3,
        ttl_s=10.0,
        max_model_len=2048,
        vocab_size=97,
        max_requests=64,
        max_step_tokens=512,
        kv_block_tokens=16,
        kv_blocks=1000,
        profile_tokens=i32(1, 2),
        profile_step_s=f32(0.5, 0.75),
        profile_row_s=0.001,
        profile_context_s=1e-6,
        profile_pair_s=2e-7,
        profile_prefill_s=-0.0005,
        profile_noise=0.03,
        profile_fingerprint="model/platform/1.0",
    ),
    RESULT,
    wire.Open(lane_id="r", rid=1, epoch=2, first_id=3, sampling=SAMPLING),
    COMMIT,
    wire.Release(lane_id="r", rid=i64(1, 2)),
    BLOCKS,
    wire.Lost(lane_id="r", rid=i64(1), epoch=i32(2), reason="idle"),
    wire.Submit(
        request_id="a",
        loan=3,
        ids=i32(1, 2),
        num_prompt=2,
        num_sent_chars=0,
        max_new_tokens=4,
        stop_ids=i32(0),
        stop_strings=("\n\n", "é"),
        ignore_eos=False,
        draft=True,
        sampling=SAMPLING,
        deadline_s=0.0,
        target_rate=12.5,
        tier="batch",
        constraint_kind="regex",
        constraint="[a-z]+é",
        adapter="sql",
    ),
    wire.Emit(
        request_id="a",
        loan=3,
        seq=0,
        text="hi ☃",
        token_ids=i32(1),
        logprobs=f32(),
        finish="stop",
        error_code="",
        error_message="",
        num_rounds=1,
        num_proposed=4,
        num_verified=3,
        num_accepted=2,
    ),
    wire.Cancel(request_id="a"),
    wire.AskProfile(nonce=7),
    wire.Profile(nonce=7, json='{"router": "a"}'),
)
