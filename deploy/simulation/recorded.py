"""Recorded traffic, as published: Azure's CSV and Mooncake's JSON lines."""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from cluster.errors import ConfigError
from cluster.json_text import parse_json

Recorded = tuple[float, int, int]
"""Seconds, prompt tokens, output tokens."""

_CSV: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_JSON: Final = ("timestamp", "input_length", "output_length")
_HINT: Final = f"CSV with {','.join(_CSV)}, or JSON lines with {', '.join(_JSON)}"
_MOST_TOKENS: Final = 1 << 30


def recorded_requests(path: Path) -> list[Recorded]:
    """The requests of a file, in the order of time; ``.gz`` is unpacked.

    Raises:
        ConfigError: unreadable, of no known format, or without a request; names the line.
    """
    text = _read(path)
    rows = _json_rows(text) if text.startswith("{") else _csv_rows(text)
    try:
        requests = sorted(rows)
    except ValueError as error:
        raise ConfigError(f"{path} is no trace: {error}", hint=_HINT) from error
    if not requests:
        raise ConfigError(f"{path} holds no request", hint=_HINT)
    return requests


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="see trace.path") from error
    try:
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (EOFError, zlib.error, OSError) as error:
        raise ConfigError(f"{path} cannot be unpacked", hint="is it whole, and gzip?") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text: not UTF-8 at byte {error.start}") from error


def _csv_rows(text: str) -> Iterator[Recorded]:
    """Raises `ValueError`."""
    reader = csv.DictReader(io.StringIO(text))
    missing = [name for name in _CSV if name not in (reader.fieldnames or ())]
    if missing:
        raise ValueError(f"no column {missing[0]}")
    for row in reader:
        moment, *lengths = (row[name] or "" for name in _CSV)
        where = f"line {reader.line_num}"
        try:
            at = datetime.fromisoformat(moment.strip()[:26]).replace(tzinfo=UTC)
        except ValueError:
            raise ValueError(f"{where}: TIMESTAMP {moment[:40]!r} is no time") from None
        counts = [
            _tokens(int(text) if text.strip().isdecimal() else text, name, where)
            for text, name in zip(lengths, _CSV[1:], strict=True)
        ]
        yield at.timestamp(), counts[0], counts[1]


def _json_rows(text: str) -> Iterator[Recorded]:
    """Raises `ValueError`."""
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"line {number}"
        try:
            row = parse_json(line)
        except ValueError as error:
            raise ValueError(f"{where}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{where}: no object")
        missing = [name for name in _JSON if name not in row]
        if missing:
            raise ValueError(f"{where}: no {missing[0]}")
        at_ms = row["timestamp"]
        if isinstance(at_ms, bool) or not isinstance(at_ms, int | float) or not _finite(at_ms):
            raise ValueError(f"{where}: timestamp {str(at_ms)[:40]!r} is no number of milliseconds")
        prompt, output = (_tokens(row[name], name, where) for name in _JSON[1:])
        yield at_ms / 1e3, prompt, output


def _finite(number: float) -> bool:
    return abs(number) < 1e18 and math.isfinite(number)


def _tokens(value: object, name: str, where: str) -> int:
    """A length. Raises `ValueError`."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_TOKENS:
        raise ValueError(f"{where}: {name} {str(value)[:40]!r} is no number of tokens")
    return value
