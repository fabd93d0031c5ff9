"""How the fields of a frame are declared: their types, limits, and which rows go together.

The codec reads the declarations (`cluster.wire.schema`) and holds every frame to them, in both
directions.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.wire.limits import MAX_ROWS, MAX_TOKENS

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


def array(
    *dtypes: str,
    ndim: int = 1,
    limit: int = MAX_TOKENS,
    most: float = math.inf,
    rows: str = "",
    total_of: str = "",
    where: str = "",
    shape_of: str = "",
    or_empty: bool = False,
) -> Any:
    """A required array field. Integers are never negative; floats are finite and, with ``most``
    given, in 0..most.

    Args:
        dtypes: those allowed.
        ndim: number of axes.
        limit: most elements.
        most: largest value.
        rows: fields of one record with the same mark have equally many rows.
        total_of: the field whose sum is the number of rows ...
        where: ... counted only where this field is not zero.
        shape_of: the field whose shape it has.
        or_empty: or else it has no elements at all.
    """
    return field(
        metadata={
            "dtypes": dtypes,
            "ndim": ndim,
            "limit": limit,
            "most": most,
            "rows": rows,
            "total_of": total_of,
            "where": where,
            "shape_of": shape_of,
            "or_empty": or_empty,
        }
    )


def column(dtype: str, rows: str, *, most: float = math.inf) -> Any:
    """A required array field with one value for each of the rows marked ``rows``."""
    return array(dtype, limit=MAX_ROWS, rows=rows, most=most)


def string(limit: int = 256) -> Any:
    """A required string or bytes field of at most ``limit`` characters."""
    return field(metadata={"limit": limit})


def items(limit: int = MAX_ROWS) -> Any:
    """A required tuple of nested records."""
    return field(metadata={"limit": limit})


def natural(limit: int = 1 << 62) -> Any:
    """A required integer in 0..limit."""
    return field(metadata={"limit": limit})


@dataclass(frozen=True, kw_only=True, eq=False)
class Record:
    """Base of frames and of the records nested in them. Equality compares arrays by value."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and all(
            _same(getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self)
        )

    __hash__ = None  # type: ignore[assignment]


class Frame(Record):
    """Base of everything that may stand alone on a stream."""


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool(np.array_equal(a, b))
    return bool(a == b)
