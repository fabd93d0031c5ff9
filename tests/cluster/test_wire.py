"""The codec: what goes in comes out, and nothing malformed gets through in either direction."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster import wire
from cluster.errors import FrameError, FrameTooLarge, ProtocolMismatch
from cluster.wire import FRAMES, Frame, decode, encode
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
    admissions=(make_admission(3, [1, 2], sampling=SAMPLING, drafter_address="127.0.0.1:1"),),
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
)


@pytest.mark.parametrize("frame", EXAMPLES, ids=lambda frame: type(frame).__name__)
def test_round_trip(frame: Frame) -> None:
    back = decode(encode(frame))
    assert back == frame
    assert encode(back) == encode(frame)


def test_every_frame_has_an_example() -> None:
    assert {type(frame).__name__ for frame in EXAMPLES} == set(FRAMES)


def test_equality_sees_array_values() -> None:
    other = dataclasses.replace(STEP, anchor=STEP.anchor + 1)
    assert other != STEP
    assert decode(encode(other)) != STEP


def test_other_byte_orders_and_strides_are_normalised() -> None:
    big = dataclasses.replace(STEP, anchor=STEP.anchor.astype(">i4"))
    wide = np.zeros((4, 2), np.float32)
    wide[:2] = STEP.q_probs
    strided = dataclasses.replace(big, q_probs=np.asfortranarray(wide[:2]))
    assert decode(encode(strided)) == STEP


def outer(frame: Frame) -> list[Any]:
    """A frame as msgpack sees it, arrays as extensions."""
    loaded: list[Any] = msgpack.unpackb(encode(frame), raw=False)
    return loaded


def packed_array(name: str, shape: list[Any], data: bytes) -> msgpack.ExtType:
    return msgpack.ExtType(1, msgpack.packb([name, shape]) + data)


def refuse(
    data: bytes, kind: type[FrameError] = FrameError, match: str | None = None
) -> FrameError:
    with pytest.raises(kind, match=match) as caught:
        decode(data)
    return caught.value


@pytest.mark.parametrize("frame", EXAMPLES, ids=lambda frame: type(frame).__name__)
def test_truncation_anywhere_is_refused(frame: Frame) -> None:
    data = encode(frame)
    for length in {*range(min(len(data), 64)), *range(0, len(data), 37)}:
        assert refuse(data[:length]).hint
    refuse(data + b"\x00")


@pytest.mark.parametrize("frame", EXAMPLES, ids=lambda frame: type(frame).__name__)
def test_missing_and_unknown_fields_are_named(frame: Frame) -> None:
    for name in outer(frame)[2]:
        version, kind, body = outer(frame)
        del body[name]
        refuse(msgpack.packb([version, kind, body]), match=rf"missing fields \['{name}'\]")
    version, kind, body = outer(frame)
    body["surprise"] = 1
    refuse(msgpack.packb([version, kind, body]), match="surprise")


@pytest.mark.parametrize("frame", EXAMPLES, ids=lambda frame: type(frame).__name__)
def test_wrong_types_name_the_field(frame: Frame) -> None:
    for name in outer(frame)[2]:
        wrongs: tuple[Any, ...] = (
            None,
            {"a": 1},
            [[]],
            b"\x00",
            packed_array("u8", [1, 1, 1], bytes(8)),
        )
        for wrong in wrongs:
            version, kind, body = outer(frame)
            body[name] = wrong
            refuse(msgpack.packb([version, kind, body]), match=rf"{kind}\.{name}")


def test_wrong_version_and_unknown_frame() -> None:
    for version in (0, 2, 1.0, True, "1", None):
        refuse(msgpack.packb([version, "Ping", {"nonce": 1}]), ProtocolMismatch)
    refuse(msgpack.packb([1, "Sneeze", {}]), match="Sneeze")
    refuse(msgpack.packb([1, ["Ping"], {"nonce": 1}]))
    refuse(msgpack.packb({"a": 1}))
    refuse(msgpack.packb([1, "Ping", [1]]), match="map of fields")


@pytest.mark.parametrize("nonce", [-1, 1 << 63, 1.5, True, "1"])
def test_integers_out_of_range(nonce: Any) -> None:
    refuse(msgpack.packb([1, "Ping", {"nonce": nonce}]), match=r"Ping\.nonce")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_not_finite_is_refused_in_both_directions(value: float) -> None:
    refuse(msgpack.packb([1, "Drain", {"deadline_s": value}]), match="not finite")
    with pytest.raises(FrameError, match="not finite"):
        encode(wire.Drain(deadline_s=value))
    version, kind, body = outer(RESULT)
    body["logprobs"] = packed_array("f4", [3], np.array([0, value, 0], "<f4").tobytes())
    refuse(msgpack.packb([version, kind, body]), match=r"StepResult\.logprobs: not finite")


HOSTILE_ARRAYS = [
    packed_array("i4", [1 << 40], b""),
    packed_array("i4", [-1], b""),
    packed_array("i4", [2, -2], bytes(16)),
    packed_array("i4", [2.0], bytes(8)),
    packed_array("i4", ["2"], bytes(8)),
    packed_array("i4", [0] * 1000, b""),
    packed_array("i4", [0, 1 << 62], b""),
    packed_array("i4", [2], bytes(7)),
    packed_array("f8", [2], bytes(16)),
    packed_array("O", [1], bytes(8)),
    packed_array("i4", [2], bytes(8) + b"\x00"),
    msgpack.ExtType(1, b""),
    msgpack.ExtType(1, b"\xc1"),
    msgpack.ExtType(1, msgpack.packb("i4")),
    msgpack.ExtType(1, msgpack.packb([["i4"], [2]]) + bytes(8)),
    msgpack.ExtType(2, msgpack.packb(["i4", [2]]) + bytes(8)),
    msgpack.Timestamp(0),
]


@pytest.mark.parametrize("hostile", HOSTILE_ARRAYS, ids=range(len(HOSTILE_ARRAYS)))
def test_hostile_arrays(hostile: Any) -> None:
    version, kind, body = outer(STEP)
    body["anchor"] = hostile
    refuse(msgpack.packb([version, kind, body]))


def test_lengths_past_their_limits() -> None:
    with pytest.raises(FrameTooLarge, match=r"Release\.rid"):
        encode(wire.Release(lane_id="r", rid=np.zeros(wire.MAX_ROWS + 1, np.int64)))
    with pytest.raises(FrameTooLarge, match=r"Acquire\.lane_id"):
        encode(wire.Acquire(lane_id="x" * 257))
    lease = next(frame for frame in EXAMPLES if isinstance(frame, wire.Lease))
    with pytest.raises(FrameTooLarge, match=r"Lease\.profile_fingerprint"):
        encode(dataclasses.replace(lease, profile_fingerprint="x" * 513))
    many = np.ones(wire.MAX_TIERS + 1)
    with pytest.raises(FrameTooLarge, match=r"Lease\.profile_tokens"):
        encode(
            dataclasses.replace(
                lease, profile_tokens=many.astype(np.int32), profile_step_s=many.astype(np.float32)
            )
        )
    with pytest.raises(FrameError, match=r"Lease\.profile_noise: not finite"):
        encode(dataclasses.replace(lease, profile_noise=float("nan")))
    with pytest.raises(FrameTooLarge, match=r"Step\.admissions"):
        encode(make_step(admissions=(make_admission(1, [1]),) * (wire.MAX_ROWS + 1)))
    refuse(msgpack.packb([1, "Acquire", {"lane_id": "x" * 257}]), FrameTooLarge)
    refuse(bytes(wire.MAX_FRAME_BYTES + 1), FrameTooLarge)


def test_huge_declared_lengths_allocate_nothing() -> None:
    refuse(b"\xdd\xff\xff\xff\xff")  # an array of 4 billion items
    refuse(b"\xdf\xff\xff\xff\xff")  # a map
    refuse(b"\xc9\xff\xff\xff\xff\x01")  # an extension
    refuse(b"\x91" * 100_000)  # nesting


@pytest.mark.parametrize(
    ("frame", "changes"),
    [
        (STEP, {"anchor": i32(1)}),
        (STEP, {"num_draft": i32(2, 1)}),
        (STEP, {"num_draft": i32(3, -1)}),
        (STEP, {"draft_ids": i32(6)}),
        (STEP, {"draft_ids": i32(6, -7)}),
        (STEP, {"has_q": u8(1, 1), "num_draft": i32(1, 1), "q_ids": STEP.q_ids[:1]}),
        (STEP, {"has_q": u8(2, 0)}),
        (STEP, {"want_draft": u8(1, 2)}),
        (STEP, {"q_probs": STEP.q_probs[:, :1]}),
        (STEP, {"q_probs": STEP.q_probs - 0.75}),
        (STEP, {"q_probs": STEP.q_probs + 0.75}),
        (STEP, {"releases": i64(-1)}),
        (RESULT, {"token_ids": i32(6, 9)}),
        (RESULT, {"logprobs": f32()}),
        (RESULT, {"finish": u8(0, 3)}),
        (COMMIT, {"num_rows": i32(2, 2)}),
        (COMMIT, {"features": COMMIT.features[:2]}),
        (BLOCKS, {"confidence": f32(0.9, 1.5)[None]}),
        (BLOCKS, {"confidence": f32(0.9)[None]}),
        (BLOCKS, {"has_q": u8(0)}),
        (SAMPLING, {"bias_values": f32(1.0)}),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else type(value).__name__,
)
def test_rows_must_match_up(frame: Any, changes: dict[str, Any]) -> None:
    wrong = dataclasses.replace(frame, **changes)
    if not isinstance(wrong, Frame):
        wrong = wire.Open(lane_id="r", rid=1, epoch=2, first_id=3, sampling=wrong)
    with pytest.raises(FrameError, match=r"(rows|negative|over|differs)"):
        encode(wrong)


def test_features_may_be_absent() -> None:
    bare = dataclasses.replace(COMMIT, features=np.zeros((0, 0), np.float32))
    assert decode(encode(bare)) == bare


def test_a_lone_surrogate_is_a_frame_error() -> None:
    with pytest.raises(FrameError, match="Cancel"):
        encode(wire.Cancel(request_id="\ud800"))


@given(st.binary(max_size=512))
@settings(max_examples=300, deadline=None)
def test_random_bytes_raise_only_frame_errors(data: bytes) -> None:
    refuse(data)


scalars = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats()
values = st.recursive(
    scalars | st.text(max_size=8) | st.binary(max_size=16),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@given(st.sampled_from(EXAMPLES), st.data())
@settings(max_examples=200, deadline=None)
def test_any_field_value_decodes_or_raises_frame_error(frame: Frame, data: st.DataObject) -> None:
    version, kind, body = outer(frame)
    body[data.draw(st.sampled_from(sorted(body)))] = data.draw(values)
    try:
        back = decode(msgpack.packb([version, kind, body]))
    except FrameError:
        return
    assert decode(encode(back)) == back


@given(st.sampled_from(EXAMPLES), st.data())
@settings(max_examples=200, deadline=None)
def test_flipped_bytes_decode_or_raise_frame_error(frame: Frame, data: st.DataObject) -> None:
    corrupt = bytearray(encode(frame))
    place = data.draw(st.integers(0, len(corrupt) - 1))
    corrupt[place] ^= data.draw(st.integers(1, 255))
    try:
        back = decode(bytes(corrupt))
    except FrameError:
        return
    assert decode(encode(back)) == back
