"""The file that a measurement writes: what may be written over."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

from cluster.errors import ConfigError
from cluster.json_text import parse_json

PICTURES: Final = ("lengths", "positions", "depths", "batches")
"""A report's pictures, `REPORT-NAME.png` beside it."""
PICTURES_BY_DRAFTER: Final = ("thresholds-", "reliability-")
"""Starts of the names of those that there is one of for each drafter."""
_PNG: Final = b"\x89PNG"


def check_writable(path: Path, *, mark: str = "rows") -> None:
    """Find out before the work, not after it, whether its result can be written.

    Args:
        mark: a key that every report of this kind has.

    Raises:
        ConfigError: it cannot, or would replace something that is no report.
    """
    try:
        if path.is_dir():
            raise ConfigError(f"--json: {path} is a folder", hint="name a file")
        if path.exists() and not _is_report(path, mark):
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


def check_folder(path: Path, flag: str) -> None:
    """Make the folder that pictures go to, before the work.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"{flag}: cannot write to {path}: {error.strerror}", hint="name a folder of yours"
        ) from error


def check_picture(path: Path, flag: str) -> None:
    """Find out before the work whether its picture, a PNG, can be written.

    Raises:
        ConfigError: it cannot, or would replace something that is no picture.
    """
    if path.is_dir():
        raise ConfigError(f"{flag}: {path} is a folder", hint="name a file")
    try:
        is_other = path.exists() and not path.read_bytes().startswith(_PNG)
    except OSError as error:
        raise ConfigError(
            f"{flag}: cannot read {path}: {error.strerror}", hint="name another file"
        ) from error
    if is_other:
        raise ConfigError(
            f"{flag}: {path} exists and is no PNG", hint="name another file, or delete it"
        )
    check_folder(path.parent, flag)


def remove_pictures(path: Path) -> None:
    """Delete the pictures of an earlier report at ``path``: they are not this one's."""
    start = f"{path.stem}-"
    for picture in path.parent.iterdir():
        name = picture.name
        if name.startswith(start) and name.endswith(".png") and picture.is_file():
            kind = name.removeprefix(start).removesuffix(".png")
            if kind in PICTURES or kind.startswith(PICTURES_BY_DRAFTER):
                picture.unlink()


def _is_report(path: Path, mark: str) -> bool:
    try:
        value = parse_json(path.read_bytes())
    except ValueError:
        return False
    return isinstance(value, dict) and mark in value
