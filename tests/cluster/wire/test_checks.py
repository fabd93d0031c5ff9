"""Nothing malformed gets through, in either direction, and the message names the field."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import numpy as np
import pytest

from cluster import wire
from cluster.errors import FrameError, FrameTooLarge
from cluster.wire import Frame, decode, encode
from tests.cluster.wire.examples import (
    BLOCKS,
    COMMIT,
    EXAMPLES,
    RESULT,
    SAMPLING,
    STEP,
    f32,
    i32,
    i64,
    u8,
)
from tests.cluster.wire.refusing import outer, packed_array, refuse
from tests.frames import make_admission, make_step


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
