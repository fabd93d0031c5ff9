"""JSON that anyone may have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

from cluster.errors import ConfigError


def parse_json(text: str | bytes, *, strict: bool = False) -> object:
    """The value that a JSON text stands for.

    Args:
        strict: refuse NaN and Infinity, which Python reads and JSON does not have.

    Raises:
        ValueError: not JSON, not UTF-8, or nested too deeply to be read.
    """
    try:
        value: object = json.loads(text, parse_constant=_refuse if strict else None)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"JSON has no {constant}")


def read_json(path: Path, hint: str) -> object:
    """What a file holds.

    Args:
        hint: where to get the right file.

    Raises:
        ConfigError: it cannot be read, or is not JSON.
    """
    try:
        return parse_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint=hint) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not JSON: not UTF-8", hint=hint) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", hint=hint) from error


def misshape(error: Exception) -> str:
    """What is wrong with a value whose parts were taken for granted, by the error that this met."""
    if isinstance(error, KeyError):
        return f"{error.args[0]!r} is missing"
    if isinstance(error, IndexError):
        return "a list is too short"
    if isinstance(error, TypeError):
        return "a value is of the wrong type"
    return str(error)
