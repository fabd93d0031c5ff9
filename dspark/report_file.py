"""The file that an evaluation writes: what may be written over."""

from __future__ import annotations

import tempfile
from pathlib import Path

from cluster.errors import ConfigError
from cluster.json_text import parse_json


def check_writable(path: Path) -> None:
    """Find out before the work, not after it, whether its result can be written.

    Raises:
        ConfigError: it cannot, or would replace something that is no report.
    """
    try:
        if path.is_dir():
            raise ConfigError(f"--json: {path} is a folder", hint="name a file")
        if path.exists() and not _is_report(path):
            raise ConfigError(
                f"--json: {path} exists and is no report", hint="name another file, or delete it"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"--json: cannot write to {path.parent}: {error.strerror}",
            hint="name a file in a folder of yours",
        ) from error


def _is_report(path: Path) -> bool:
    try:
        value = parse_json(path.read_bytes())
    except ValueError:
        return False
    return isinstance(value, dict) and "rows" in value
