"""Files that are either whole or absent: written beside their place, synced, then renamed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from safetensors import SafetensorError

from cluster.errors import StorageFull


def write_bytes(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``.

    Raises:
        StorageFull: the disk is full; what stood at ``path`` before is untouched.
    """
    write_whole(path, lambda part: part.write_bytes(data))


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` fill a file beside ``path``, then put it in its place (see `write_bytes`)."""
    with no_space(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path)
        with _own_part(path) as file:
            part = Path(file.name)
            try:
                write(part)
                os.fsync(file.fileno())
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """Write ``value`` as readable JSON (see `write_bytes`)."""
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode())


def append_lines(path: Path, lines: Sequence[str]) -> None:
    """Append whole lines to a text file and sync it; after an error the file is as before.

    Raises:
        StorageFull: the disk is full.
    """
    data = memoryview("".join(f"{line}\n" for line in lines).encode())
    with no_space(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            before = file.tell()
            try:
                while data:  # a disk about to be full takes a part
                    data = data[file.write(data) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(before)
                raise


@contextmanager
def no_space(path: Path) -> Iterator[None]:
    """Turn "no space left" while writing ``path`` into `StorageFull`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise StorageFull(f"cannot write {path}: {error}", hint=_HINT) from error
    except (RuntimeError, SafetensorError) as error:
        # torch and safetensors wrap the operating system's error.
        if "No space left" not in str(error) and "unexpected pos" not in str(error):
            raise
        raise StorageFull(f"cannot write {path}: {error}", hint=_HINT) from error


def _own_part(path: Path) -> BinaryIO:
    """A file beside ``path`` that no other writer has, locked for as long as it is open."""
    while True:
        file = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part").open("xb")
        with suppress(OSError):  # no locks on this file system: then nothing is removed either
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # another writer took it for abandoned before it was locked


def _remove_abandoned(path: Path) -> None:
    """Delete parts of ``path`` that a kill left behind: nobody holds their lock any more."""
    start = f".{path.name}."
    for part in path.parent.iterdir():
        if part.name.startswith(start) and part.name.endswith(".part"):
            with suppress(OSError), part.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink(missing_ok=True)


_HINT: Final = "free some space and start again: the run goes on from what is there"
