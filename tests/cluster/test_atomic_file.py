"""Files whole or absent, also when several write the same one and when a writer is killed."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from cluster.atomic_file import write_bytes, write_json
from cluster.errors import StorageFull


def test_two_writers_of_one_path_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "file"
    fsync, seen = os.fsync, list[bytes]()

    def overtaken(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        write_bytes(path, b"second, and longer")
        seen.append(path.read_bytes())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", overtaken)
    write_bytes(path, b"first")
    assert seen == [b"second, and longer"]
    assert path.read_bytes() == b"first"
    assert [one.name for one in path.parent.iterdir()] == ["file"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(tmp_path / "file", {"old": 1})
    before = (tmp_path / "file").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFull, match="cannot write"):
        write_json(tmp_path / "file", {"new": 2})
    assert (tmp_path / "file").read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_parts_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    abandoned, living, other = (
        tmp_path / name for name in (".file.dead.part", ".file.alive.part", ".other.dead.part")
    )
    for part in (abandoned, living, other):
        part.write_bytes(b"half")
    with living.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        write_bytes(tmp_path / "file", b"whole")
    assert {one.name for one in tmp_path.iterdir()} == {"file", living.name, other.name}


def test_a_file_is_readable_by_whom_the_umask_says(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    write_bytes(tmp_path / "file", b"")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode
