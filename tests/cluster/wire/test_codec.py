"""The codec: what goes in comes out, byte for byte, and no other bytes get through."""

from __future__ import annotations

import dataclasses
import hashlib

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster import wire
from cluster.errors import FrameError, ProtocolMismatch
from cluster.wire import FRAMES, Frame, decode, encode
from tests.cluster.wire.examples import EXAMPLES, STEP
from tests.cluster.wire.refusing import outer, refuse

GOLDEN = {
    "Hello": "901a997bf80330ee",
    "Refused": "bd3f52dbb71019b1",
    "Ping": "f5fa542d4f0c293e",
    "Pong": "27d2e6bc9582fbf5",
    "Drain": "27427c811e17ac54",
    "Acquire": "018b49eb2314f110",
    "Step": "932e945bd05bb0d4",
    "Lease": "a21b5a30c2aa3225",
    "StepResult": "26a50e49b24b050e",
    "Open": "1838654501145ea8",
    "Commit": "5c07abb063b8d012",
    "Release": "b0182f162ff8344f",
    "Blocks": "b2e667cbb6c9e554",
    "Lost": "ccd4726781dcfc1d",
    "Submit": "93803b36a5121f3b",
    "Emit": "719301f020cb38b1",
    "Cancel": "1932eacaddbefa46",
    "AskProfile": "ed7bf00ce78770ca",
    "Profile": "6eabafa8cff988cc",
}
"""BLAKE2b of each example's bytes. A frame that changes breaks members of other releases: raise
`PROTOCOL_VERSION` with it."""


@pytest.mark.parametrize("frame", EXAMPLES, ids=lambda frame: type(frame).__name__)
def test_round_trip(frame: Frame) -> None:
    back = decode(encode(frame))
    assert back == frame
    assert encode(back) == encode(frame)


@pytest.mark.parametrize("frame", EXAMPLES, ids=lambda frame: type(frame).__name__)
def test_bytes_are_those_of_this_protocol_version(frame: Frame) -> None:
    digest = hashlib.blake2b(encode(frame), digest_size=8).hexdigest()
    assert digest == GOLDEN[type(frame).__name__]


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


def test_a_lone_surrogate_is_a_frame_error() -> None:
    with pytest.raises(FrameError, match="Cancel"):
        encode(wire.Cancel(request_id="\ud800"))


def test_wrong_version_and_unknown_frame() -> None:
    for version in (0, 2, 1.0, True, "1", None):
        refuse(msgpack.packb([version, "Ping", {"nonce": 1}]), ProtocolMismatch)
    refuse(msgpack.packb([1, "Sneeze", {}]), match="Sneeze")
    refuse(msgpack.packb([1, ["Ping"], {"nonce": 1}]))
    refuse(msgpack.packb({"a": 1}))
    refuse(msgpack.packb([1, "Ping", [1]]), match="map of fields")


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


def test_huge_declared_lengths_allocate_nothing() -> None:
    refuse(b"\xdd\xff\xff\xff\xff")  # an array of 4 billion items
    refuse(b"\xdf\xff\xff\xff\xff")  # a map
    refuse(b"\xc9\xff\xff\xff\xff\x01")  # an extension
    refuse(b"\x91" * 100_000)  # nesting


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
