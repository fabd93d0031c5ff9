"""Reading a tree of frozen dataclasses from plain data: unknown keys, wrong types and values out of
range are refused with a `ConfigError` that names the path, e.g. ``router.max_queued_tokens``.

The bounds of a field stand in its metadata; `positive`, `natural` and `one_of` make the usual ones.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Final

from cluster.errors import ConfigError
from cluster.yaml_text import yaml_float

T = typing.TypeVar("T")
Bounds = Mapping[str, Any] | types.MappingProxyType[Any, Any]

_KINDS: Final[dict[Any, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
}
_MAX_WHOLE: Final = 1 << 62
"""Any count or size that is larger is a slip, and does not fit the wire."""
_MAX_SHOWN: Final = 64


def positive(default: float, *, most: float = math.inf) -> Any:
    """A number in (0, most]."""
    return field(default=default, metadata={"over": 0, "most": most})


def natural(default: int, *, most: float = math.inf) -> Any:
    """An integer in 0..most."""
    return field(default=default, metadata={"least": 0, "most": most})


def one_of(default: str, *others: str) -> Any:
    """One of these words."""
    return field(default=default, metadata={"words": (default, *others)})


def parse_section(cls: type[T], value: Any, path: str) -> T:
    """A section and those inside it. Fields are scalars, sections, or tuples or mappings of
    either, ``tuple[X, ...]`` and ``Mapping[str, X]``; keys are read by the metadata's ``read_key``.

    Args:
        path: of the section, for messages; empty for the root.

    Raises:
        ConfigError: names the path.
    """
    return typing.cast(T, _parse(cls, value, path))


def _parse(cls: type[Any], value: Any, path: str) -> Any:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{path or 'config'}: expected a mapping, got {_shown(value)}",
            hint="KEY: VALUE lines" if value is None or not path else "",
        )
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    parsed = {}
    for key, item in value.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in fields:
            raise ConfigError(
                f"{where}: unknown key", hint=f"known keys here: {', '.join(sorted(fields))}"
            )
        parsed[key] = _value(item, hints[key], fields[key].metadata, where)
    return cls(**parsed)


def _value(item: Any, kind: Any, bounds: Bounds, path: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _parse(typing.cast("type[Any]", kind), item, path)
    if typing.get_origin(kind) is tuple:
        if not isinstance(item, list):
            raise ConfigError(
                f"{path}: expected a list, got {_shown(item)}", hint="[A, B, ...], or [] for none"
            )
        inner = typing.get_args(kind)[0]
        return tuple(_value(one, inner, bounds, f"{path}[{n}]") for n, one in enumerate(item))
    if typing.get_origin(kind) is Mapping:
        return _mapping(item, kind, bounds, path)
    if kind is Any:  # somebody else's to judge
        return item
    return _scalar(item, kind, bounds, path)


def _mapping(value: Any, kind: Any, bounds: Bounds, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{path}: expected a mapping, got {_shown(value)}", hint="NAME: VALUE lines, or {}"
        )
    inner = typing.get_args(kind)[1]
    keys = {"read": bounds["read_key"]} if "read_key" in bounds else {}
    return {
        _scalar(key, str, keys, f"{path}, a key"): _value(one, inner, bounds, f"{path}.{key}")
        for key, one in value.items()
    }


def _scalar(value: Any, kind: Any, bounds: Bounds, path: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        # Far more than anything is bounded by, and a whole number may be too large for a float.
        value = float(max(min(value, _MAX_WHOLE), -_MAX_WHOLE))
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ConfigError(
            f"{path}: expected {_KINDS[kind]}, got {_shown(value)}", hint=_hint(value, kind)
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path}: {value} is not a finite number", hint=_range(bounds))
    if "words" in bounds and value not in bounds["words"]:
        words = ", ".join(word or "''" for word in bounds["words"])
        raise ConfigError(f"{path}: {value!r} is not one of {words}")
    if "read" in bounds:
        try:
            bounds["read"](value)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.message}", hint=error.hint) from error
    _check_range(value, bounds, path)
    return value


def _check_range(value: Any, bounds: Bounds, path: str) -> None:
    if "over" in bounds and value <= bounds["over"]:
        raise ConfigError(f"{path}: {_shown(value)} must be over {bounds['over']}")
    if "least" in bounds and value < bounds["least"]:
        raise ConfigError(f"{path}: {_shown(value)} must be at least {bounds['least']}")
    most = bounds.get("most", math.inf)
    if type(value) is int:
        most = min(most, _MAX_WHOLE)
    if type(value) in (int, float) and value > most:
        raise ConfigError(f"{path}: {_shown(value)} must be at most {most}")


def _range(bounds: Bounds) -> str:
    """What the bounds say, for a hint."""
    words = {"over": "over", "least": "at least", "most": "at most"}
    said = [f"{words[name]} {bounds[name]}" for name in words if name in bounds]
    return ", ".join(text for text in said if not text.endswith("inf"))


def _shown(value: Any) -> str:
    """A value as the writer of the file would call it."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {value[:_MAX_SHOWN]!r}"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, int) and abs(value) > _MAX_WHOLE:
        return f"{'-' if value < 0 else ''}2^{value.bit_length() - 1} or more"
    return str(value)[:_MAX_SHOWN]


def _hint(value: Any, kind: Any) -> str:
    """How to write what was probably meant."""
    if kind is str and isinstance(value, bool | int | float):
        return "put it in quotes, if that is its name"
    if kind is bool and isinstance(value, str) and value.lower() in ("true", "false"):
        return f"{value.lower()}, without quotes"
    if kind not in (int, float) or not isinstance(value, str | float):
        return ""
    number = _number(value)
    if number is None or (kind is int and not number.is_integer()):
        return ""
    text = str(int(number)) if kind is int else yaml_float(number)
    if isinstance(value, str) and "e" in value.lower():
        return f"YAML 1.1 takes {value.strip()} for text, it wants a point and a sign: write {text}"
    return f"write {text}"


def _number(value: str | float) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if abs(number) < _MAX_WHOLE else None
