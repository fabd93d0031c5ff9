"""Frames as msgpack sees them, to be made wrong, and the check that `decode` refuses them."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from cluster.errors import FrameError
from cluster.wire import Frame, decode, encode


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
