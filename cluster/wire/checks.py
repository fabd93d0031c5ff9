"""The rules of single values and of rows that go together, for frames on their way in and out."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cluster.errors import FrameError, FrameTooLarge
from cluster.wire.fields import Record
from cluster.wire.schema import Field, row_rules

DTYPES: Final = {name: np.dtype("<" + name) for name in ("i4", "i8", "u1", "u2", "u8", "f2", "f4")}
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
"""By dtype: how it is spelt on the wire."""


def check_value(value: Any, spec: Field, path: str) -> Any:
    """Return ``value`` in canonical form, or raise naming ``path``."""
    kind, item, meta = spec.kind, spec.item, spec.meta
    if "dtypes" in meta:
        return _check_array(value, meta, path)
    if item is not None:
        if not isinstance(value, tuple) or not all(isinstance(v, item) for v in value):
            raise FrameError(f"{path}: expected a tuple of {item.__name__}")
        check_length(len(value), meta, path)
        return value
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise FrameError(f"{path}: expected a number, got {type(value).__name__}")
        if not math.isfinite(value):
            raise FrameError(f"{path}: not finite")
        return float(value)
    if kind is int:
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise FrameError(f"{path}: expected an integer, got {type(value).__name__}")
        if not 0 <= value <= meta["limit"]:
            raise FrameError(f"{path}: {value} is outside 0..{meta['limit']}")
        return int(value)
    if not isinstance(value, kind):
        raise FrameError(f"{path}: expected {kind.__name__}, got {type(value).__name__}")
    if kind is str:
        check_length(len(value), meta, path)
    return value


def _check_array(value: Any, meta: dict[str, Any], path: str) -> NDArray[Any]:
    if not isinstance(value, np.ndarray):
        raise FrameError(f"{path}: expected an array, got {type(value).__name__}")
    dtype = value.dtype.newbyteorder("<")
    if NAMES.get(dtype) not in meta["dtypes"]:
        raise FrameError(f"{path}: dtype {value.dtype} is not one of {meta['dtypes']}")
    if value.ndim != meta["ndim"]:
        raise FrameError(f"{path}: {value.ndim} axes, expected {meta['ndim']}")
    check_length(value.size, meta, path)
    _check_values(value, meta["most"], path)
    return value.astype(dtype, copy=False)


def _check_values(value: NDArray[Any], most: float, path: str) -> None:
    if value.size == 0:
        return
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        raise FrameError(f"{path}: not finite")
    bounded = most < math.inf
    if (bounded or value.dtype.kind == "i") and value.min() < 0:
        raise FrameError(f"{path}: {value.min()} is negative")
    if bounded and value.max() > most:
        raise FrameError(f"{path}: {value.max()} is over {most}")


def check_rows(cls: type[Record], values: dict[str, Any], path: str) -> None:
    """Refuse arrays of one record whose lengths do not match up."""
    marks: dict[str, int] = {}
    for name, _, _, _, meta in row_rules(cls):
        value = values[name]
        num_rows = len(value)
        if meta["or_empty"] and value.size == 0:
            continue
        if meta["rows"] and marks.setdefault(meta["rows"], num_rows) != num_rows:
            raise FrameError(f"{path}.{name}: {num_rows} rows, expected {marks[meta['rows']]}")
        if meta["shape_of"] and value.shape != values[meta["shape_of"]].shape:
            raise FrameError(f"{path}.{name}: shape {value.shape} differs from {meta['shape_of']}")
        if meta["total_of"]:
            counts = values[meta["total_of"]]
            if meta["where"]:
                counts = counts[values[meta["where"]] != 0]
            if (total := int(counts.sum(dtype=np.int64))) != num_rows:
                raise FrameError(f"{path}.{name}: {num_rows} rows, {meta['total_of']} says {total}")


def check_length(length: int, meta: dict[str, Any], path: str) -> None:
    """Refuse a string, tuple or array that is longer than its field allows."""
    if length > meta["limit"]:
        raise FrameTooLarge(f"{path}: length {length} exceeds {meta['limit']}")
