"""JSON that anyone may have written."""

from __future__ import annotations

import json


def parse_json(text: str | bytes) -> object:
    """The value that a JSON text stands for.

    Raises:
        ValueError: not JSON, not UTF-8, or nested too deeply to be read.
    """
    try:
        value: object = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return value
