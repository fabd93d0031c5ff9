"""The codec: frames to bytes and back.

A frame on the wire is a msgpack array ``[PROTOCOL_VERSION, frame name, {field: value}]``; a
numpy array is an extension holding dtype, shape and raw bytes. Decoding refuses unknown
frames, missing or unexpected fields, wrong types, lengths past the hard limits and non-finite
floats, negative integers and rows that do not match up, each with a `FrameError` that names the
field: whatever passes ``decode`` is well formed. Checks that need context (vocabulary, gamma,
epoch, digest) belong to the receiver.
"""

from __future__ import annotations

import math
import operator
import typing
from typing import Any, Final

import msgpack
import numpy as np
from numpy.typing import NDArray

from cluster.errors import FrameError, FrameTooLarge, ProtocolMismatch
from cluster.wire.checks import DTYPES, NAMES, check_length, check_rows, check_value
from cluster.wire.drafts import Blocks, Commit, Lost, Open, Release
from cluster.wire.fields import Frame, Record
from cluster.wire.limits import MAX_FRAME_BYTES, PROTOCOL_VERSION
from cluster.wire.link import Drain, Hello, Ping, Pong, Refused
from cluster.wire.profiles import AskProfile, Profile
from cluster.wire.requests import Cancel, Emit, Submit
from cluster.wire.schema import fields_of
from cluster.wire.steps import Acquire, Lease, Step, StepResult

FRAMES: Final[dict[str, type[Frame]]] = {
    cls.__name__: cls
    for cls in (
        Hello, Refused, Ping, Pong, Drain, Acquire, Step, Lease, StepResult, Open, Commit,
        Release, Blocks, Lost, Submit, Emit, Cancel, AskProfile, Profile,
    )
}  # fmt: skip

_EXT_ARRAY: Final = 1
_ANOTHER_LANGUAGE: Final = "the peer is no DSpark member of this release, or the bytes were damaged"


def encode(frame: Frame) -> bytes:
    """Serialise a frame.

    Raises:
        FrameError: a field breaks the wire rules (ours to fix: the message names it).
        FrameTooLarge: the result exceeds `MAX_FRAME_BYTES`.
    """
    name = type(frame).__name__
    body = _pack_record(frame, name)
    try:
        data: bytes = msgpack.packb([PROTOCOL_VERSION, name, body], use_bin_type=True)
    except ValueError as error:  # a lone surrogate in a string, or past msgpack's 4 GiB
        raise FrameError(f"{name}: cannot be encoded: {error}") from error
    if len(data) > MAX_FRAME_BYTES:
        raise FrameTooLarge(f"{name} of {len(data)} bytes exceeds {MAX_FRAME_BYTES}")
    return data


def decode(data: bytes) -> Frame:
    """Parse and check one frame.

    Raises:
        FrameTooLarge: more than `MAX_FRAME_BYTES`, or a field over its limit.
        ProtocolMismatch: another protocol version.
        FrameError: anything else that is not a well-formed frame.
    """
    if len(data) > MAX_FRAME_BYTES:
        raise FrameTooLarge(f"frame of {len(data)} bytes exceeds {MAX_FRAME_BYTES}")
    try:
        outer = msgpack.unpackb(
            data, raw=False, strict_map_key=True, ext_hook=_unpack_array, use_list=True
        )
    except FrameError:
        raise
    except Exception as error:  # msgpack raises many kinds on hostile bytes
        raise FrameError(
            f"not msgpack: {type(error).__name__}: {error}", hint=_ANOTHER_LANGUAGE
        ) from error
    if not (isinstance(outer, list) and len(outer) == 3 and isinstance(outer[1], str)):
        raise FrameError("not a frame: expected [version, name, fields]", hint=_ANOTHER_LANGUAGE)
    version, name, body = outer
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"protocol version {str(version)[:32]}, expected {PROTOCOL_VERSION}",
            hint="run the same release on every node",
        )
    cls = FRAMES.get(name)
    if cls is None:
        raise FrameError(f"unknown frame {name[:64]!r}", hint=_ANOTHER_LANGUAGE)
    return typing.cast(Frame, _unpack_record(cls, body, name))


def _pack_record(record: Record, path: str) -> dict[str, Any]:
    values = {
        spec.name: check_value(getattr(record, spec.name), spec, f"{path}.{spec.name}")
        for spec in fields_of(type(record))
    }
    check_rows(type(record), values, path)
    return {name: _pack(value, f"{path}.{name}") for name, value in values.items()}


def _pack(value: Any, path: str) -> Any:
    if isinstance(value, np.ndarray):
        head = msgpack.packb([NAMES[value.dtype], list(value.shape)])
        return msgpack.ExtType(_EXT_ARRAY, head + np.ascontiguousarray(value).tobytes())
    if isinstance(value, Record):
        return _pack_record(value, path)
    if isinstance(value, tuple):
        return [_pack(item, f"{path}[{i}]") for i, item in enumerate(value)]
    return value


def _unpack_array(code: int, data: bytes) -> NDArray[Any]:
    if code != _EXT_ARRAY:
        raise FrameError(f"unknown extension {code}")
    unpacker = msgpack.Unpacker(max_buffer_size=len(data))
    unpacker.feed(data)
    try:
        name, shape = unpacker.unpack()
        dtype = DTYPES[name]
        dims = tuple(operator.index(n) for n in shape)
    except Exception as error:
        raise FrameError("array with a malformed head") from error
    offset = unpacker.tell()
    too_odd = len(dims) > 3 or any(not 0 <= n <= MAX_FRAME_BYTES for n in dims)
    if too_odd or len(data) - offset != math.prod(dims) * dtype.itemsize:
        raise FrameError(f"array does not match its {len(data) - offset} bytes: {str(dims)[:64]}")
    return np.frombuffer(data, dtype, offset=offset).reshape(dims)


def _unpack_record(cls: type[Any], body: Any, path: str) -> Any:
    if not isinstance(body, dict):
        raise FrameError(f"{path}: expected a map of fields")
    fields = fields_of(cls)
    expected = {spec.name for spec in fields}
    if body.keys() != expected:
        missing, extra = (
            sorted(expected - body.keys()),
            [str(k)[:64] for k in body.keys() - expected],
        )
        raise FrameError(f"{path}: missing fields {missing[:8]}, unexpected fields {extra[:8]}")
    values = {}
    for spec in fields:
        where = f"{path}.{spec.name}"
        value = body[spec.name]
        if spec.item is not None and isinstance(value, list):
            check_length(len(value), spec.meta, where)
            value = tuple(
                _unpack_record(spec.item, v, f"{where}[{i}]") if spec.is_record else v
                for i, v in enumerate(value)
            )
        elif spec.is_record and spec.item is None:
            value = _unpack_record(spec.kind, value, where)
        values[spec.name] = check_value(value, spec, where)
    check_rows(cls, values, path)
    return cls(**values)
