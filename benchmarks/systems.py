"""The systems that `engines.py` compares, each loaded in processes of its own.

One is measured at a time, and the others' processes are held (`hold`): idle, a private Ray and our
heartbeats take a tenth of a core, which would be taken from whoever is measured.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import psutil
import vllm_alone
import yaml

from cluster.config import load_config
from cluster.environment import child_environment, variables
from cluster.errors import Unavailable
from deploy.service import require_free, wait_ready
from dspark.async_client import AsyncClient
from dspark.bench.asks import Mix
from dspark.bench.figures import Figure
from dspark.bench.interleaved import Blocks, Setting, Timing

START_S = 600.0
"""Most time that a system may take to load; vLLM's compiler takes minutes."""
_LOOK_S = 0.5
_END_S = 30.0


class System(Protocol):
    """One way of serving the target."""

    name: str

    async def start(self) -> Figure:
        """Load, and say what runs.

        Raises:
            DSparkError: it does not run here, and why.
        """
        ...

    async def measure(self, mix: Mix, *, repeat: int, users: int, timing: Timing) -> Figure:
        """One block, as `dspark.bench.interleaved.Blocks` measures it.

        Raises:
            DSparkError: it failed.
        """
        ...

    @property
    def pid(self) -> int | None:
        """Of the process above all others; None before the start."""
        ...

    async def close(self) -> None:
        """End its processes. Idempotent."""
        ...


class AloneSystem:
    """vLLM in a child process, see `vllm_alone`."""

    def __init__(self, name: str, settings: vllm_alone.Settings) -> None:
        self.name = name
        self._settings = settings
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=vllm_alone.run, args=(theirs, settings), name=name, daemon=True
        )
        self._theirs = theirs

    async def start(self) -> Figure:
        """See `System.start`."""
        # Drafting by n-grams computes with numba, which otherwise has OpenMP use all cores.
        with variables(NUMBA_NUM_THREADS=str(self._settings.threads)):
            self._process.start()
        self._theirs.close()
        return await self._answer(START_S)

    async def measure(self, mix: Mix, *, repeat: int, users: int, timing: Timing) -> Figure:
        """See `System.measure`."""
        order = vllm_alone.BlockOrder(
            mix=mix, repeat=repeat, users=users, timing=timing, name=self.name
        )
        self._pipe.send(order)
        return await self._answer(START_S)

    async def _answer(self, patience_s: float) -> Figure:
        try:
            if not await asyncio.to_thread(self._pipe.poll, patience_s):
                raise Unavailable(f"{self.name}: no answer after {patience_s:.0f} s")
            answer: Figure | str = self._pipe.recv()
        except EOFError:
            raise Unavailable(f"{self.name}: its process ended") from None
        if isinstance(answer, str):
            raise Unavailable(f"{self.name}: {answer}")
        return answer

    @property
    def pid(self) -> int | None:
        """See `System.pid`."""
        return self._process.pid

    async def close(self) -> None:
        """See `System.close`."""
        if self._process.pid is None:
            return
        with suppress(OSError):
            self._pipe.send(None)
        await asyncio.to_thread(self._process.join, _END_S)
        if self._process.is_alive():
            self._process.kill()
        self._pipe.close()


class Client(Protocol):
    """What asks a server."""

    async def close(self) -> None:
        """End the connections."""
        ...


C = TypeVar("C", bound=Client)


class ServerSystem(Generic[C]):
    """A server in processes of its own, and what asks it.

    Args:
        name: of the system.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._folder: Path | None = None
        """Of configuration and log."""
        self._process: subprocess.Popen[bytes] | None = None
        self._client: C | None = None

    @property
    def client(self) -> C:
        """Of the server; it has started."""
        assert self._client is not None, "not started"
        return self._client

    @property
    def pid(self) -> int | None:
        """See `System.pid`."""
        return None if self._process is None else self._process.pid

    async def close(self) -> None:
        """See `System.close`."""
        if self._client is not None:
            await self._client.close()
            self._client = None
        if self._process is not None:
            await asyncio.to_thread(end_tree, self._process)
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


class OurSystem(ServerSystem[AsyncClient]):
    """``dspark serve``: router, drafter and verifier on a private Ray, asked over gRPC.

    Args:
        config: of the server, as YAML has it.
    """

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        super().__init__(name)
        self._given = config
        self._config = load_config(config)
        self._token = secrets.token_urlsafe(24)  # the port listens on every interface
        self._address = f"127.0.0.1:{self._config.cluster.grpc_port}"
        self._base: dict[str, str] = {}

    async def start(self) -> Figure:
        """See `System.start`."""
        await asyncio.to_thread(self._launch)
        await asyncio.to_thread(self._wait)
        self._client = AsyncClient(self._address, token=self._token)
        self._base = await self._client.get_scheduling()
        return {"config": self._given, "scheduling": self._base}

    def _launch(self) -> None:
        require_free(self._config.cluster.grpc_port)
        self._folder = folder = Path(tempfile.mkdtemp(prefix="dspark-engines-"))
        (folder / "config.yaml").write_text(yaml.safe_dump(self._given))
        command = [sys.executable, "-m", "dspark", "serve", "--config", str(folder / "config.yaml")]
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environment(DSPARK_TOKEN=self._token),
            )

    def _wait(self) -> None:
        assert self._process is not None
        assert self._folder is not None
        until_s = time.monotonic() + START_S
        while self._process.poll() is None:
            try:
                wait_ready(self._address, self._config, _LOOK_S)
            except Unavailable:
                if time.monotonic() > until_s:
                    raise
            else:
                return
        log = (self._folder / "log").read_text(errors="replace")
        raise Unavailable(f"{self.name}: {' '.join(log.split())[-600:]}")

    async def measure(self, mix: Mix, *, repeat: int, users: int, timing: Timing) -> Figure:
        """See `System.measure`."""
        blocks = Blocks(self.client, mix, self._base)
        setting = Setting(name=self.name)
        return await blocks.measure(setting, repeat=repeat, users=users, timing=timing)


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to go; what of its processes is left after a while is killed."""
    with suppress(psutil.NoSuchProcess):
        server = psutil.Process(process.pid)
        ours = [*server.children(recursive=True), server]
        process.send_signal(signal.SIGTERM)
        _, left = psutil.wait_procs(ours, timeout=_END_S)
        for straggler in left:
            with suppress(psutil.NoSuchProcess):  # psutil refuses an id that has been reused
                straggler.kill()
    process.wait()


def tree(pid: int | None) -> list[psutil.Process]:
    """A process and all below it that live."""
    try:
        root = psutil.Process(pid) if pid is not None else None
        return [] if root is None else [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def hold(system: System) -> None:
    """Stop its processes where they are."""
    for process in tree(system.pid):
        with suppress(psutil.NoSuchProcess):
            process.suspend()


def let_go(system: System) -> None:
    """Have them go on."""
    for process in tree(system.pid):
        with suppress(psutil.NoSuchProcess):
            process.resume()


def cpu_s(system: System) -> float:
    """Processor seconds that its processes have used so far."""
    total = 0.0
    for process in tree(system.pid):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total
