"""The declared fields of a frame or record, as the codec needs them; worked out once per class."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from cluster.wire.fields import Record


class Field(typing.NamedTuple):
    """What the codec must know of one field."""

    name: str
    kind: Any
    item: Any
    """Type of a tuple's items, None for other kinds."""
    is_record: bool
    """Whether the value (or each item) is a record itself."""
    meta: dict[str, Any]


_plans: dict[type, tuple[Field, ...]] = {}
_row_plans: dict[type, tuple[Field, ...]] = {}


def fields_of(cls: type[Record]) -> tuple[Field, ...]:
    """All fields of a class, in order."""
    if cls not in _plans:
        hints = typing.get_type_hints(cls)
        _plans[cls] = tuple(
            Field(
                name=spec.name,
                kind=hints[spec.name],
                item=_item_type(hints[spec.name]),
                is_record=_is_record(_item_type(hints[spec.name]) or hints[spec.name]),
                meta=dict(spec.metadata),
            )
            for spec in dataclasses.fields(cls)
        )
    return _plans[cls]


def row_rules(cls: type[Record]) -> tuple[Field, ...]:
    """Those whose rows have to match other fields'."""
    if cls not in _row_plans:
        rules = ("rows", "total_of", "shape_of")
        _row_plans[cls] = tuple(f for f in fields_of(cls) if any(map(f.meta.get, rules)))
    return _row_plans[cls]


def _item_type(kind: Any) -> type[Any] | None:
    if typing.get_origin(kind) is tuple:
        return typing.cast("type[Any]", typing.get_args(kind)[0])
    return None


def _is_record(kind: Any) -> bool:
    return (
        isinstance(kind, type)
        and not isinstance(kind, types.GenericAlias)
        and issubclass(kind, Record)
    )
