"""Recorded traffic, as published: Azure's CSV and Mooncake's JSON lines."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError

Recorded = tuple[float, int, int]
"""Seconds, prompt tokens, output tokens."""


def recorded_requests(path: Path) -> list[Recorded]:
    """The requests of a file, in the order of time; ``.gz`` is unpacked.

    Raises:
        ConfigError: unreadable, of no known format, or without a request.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no text: {error}") from error
    try:
        rows = sorted(_json_rows(text) if text.startswith("{") else _csv_rows(text))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no known trace: {error!r}",
            hint="CSV with TIMESTAMP,ContextTokens,GeneratedTokens or JSON lines with "
            "timestamp, input_length, output_length",
        ) from error
    if not rows:
        raise ConfigError(f"{path} holds no request")
    return rows


def _csv_rows(text: str) -> Iterator[Recorded]:
    for row in csv.DictReader(io.StringIO(text)):
        moment = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26]).replace(tzinfo=UTC)
        yield moment.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"])


def _json_rows(text: str) -> Iterator[Recorded]:
    for line in text.splitlines():
        if line.strip():
            row: dict[str, Any] = json.loads(line)
            yield row["timestamp"] / 1e3, int(row["input_length"]), int(row["output_length"])
