"""A private Ray on this machine, or a seat in a running one; stops only what it started."""

from __future__ import annotations

import logging
import secrets
import shutil
import signal
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import psutil

from cluster.environment import variable
from cluster.errors import Unavailable

LOOPBACK: Final = "127.0.0.1"
_OBJECT_STORE_BYTES: Final = 100 << 20
"""Nothing of ours passes through Ray's object store; this is about the least it accepts."""
_EXIT_TIMEOUT_S: Final = 10.0


@contextmanager
def private_ray(*, num_cpus: int) -> Iterator[None]:
    """A new Ray of this process's own: quiet, guarded by a token of its own, gone without a trace.

    Args:
        num_cpus: logical CPUs, what deployments reserve; not a limit on real cores.

    Raises:
        Unavailable: Ray did not start.
    """
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    folder = Path(tempfile.mkdtemp(prefix="dspark-"))  # short: Ray puts Unix sockets below it
    try:
        # Ray asks for a token by default and would leave a made one in the home directory.
        # Replicas make torch's compilation cache on import, wherever this points.
        with (
            variable("RAY_AUTH_TOKEN", _process_token()),
            variable("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor")),
        ):
            _init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=str(folder),
            )
            yield
    finally:
        children = psutil.Process().children(recursive=True)
        _shutdown()
        _reap([process for process in children if process.pid not in before])
        _remove(folder)


@cache
def _process_token() -> str:
    """The token of every private Ray of this process: Ray reads it once and keeps it."""
    return secrets.token_hex(16)


@contextmanager
def joined_ray(address: str) -> Iterator[None]:
    """A connection to a running Ray, left running afterwards.

    Raises:
        Unavailable: no Ray answers at ``address``.
    """
    try:
        _init(address=address)
        yield
    finally:
        _shutdown()


def _init(**options: Any) -> None:
    import ray

    with warnings.catch_warnings(), _own_sigterm():
        warnings.simplefilter("ignore")  # Ray announces its coming defaults
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise Unavailable(
                f"Ray did not start or answer: {first}",
                hint="check free memory and disk; for --ray, the address and its `ray status`",
            ) from error


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Ray takes SIGTERM for itself, prints a stack and dies of it, and nothing that it started
    here is cleaned up: give the signal back to whoever had it."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _shutdown() -> None:
    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.shutdown()


def _reap(processes: list[psutil.Process]) -> None:
    """Wait for Ray's processes to end and end the stragglers, by the ids recorded while ours."""
    _, alive = psutil.wait_procs(processes, timeout=_EXIT_TIMEOUT_S)
    for process in alive:
        try:
            process.kill()  # psutil refuses if the id has been reused since
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=_EXIT_TIMEOUT_S)


def _remove(folder: Path) -> None:
    for _ in range(3):  # a process that is just ending may still write its last log line
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
