"""vLLM behind its own API server, asked over HTTP by the client that asks ours over gRPC.

What a user of vLLM runs: API server and engine in two processes, tokens streamed as server-sent
events. By default vLLM leaves a core to the API server; on two cores that halves it (16 users: 148
instead of 224 tokens/s), so the engine gets all, as ours does. Prompts go in as token ids, so that
nobody's chat template makes a difference.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import aiohttp
from systems import START_S, ServerSystem
from vllm_alone import BLOCK_TOKENS, Settings

from cluster.environment import child_environment
from cluster.errors import Unavailable
from deploy.service import require_free
from deploy.text_model import load_text_model
from dspark.async_client import AsyncClient
from dspark.bench.asks import Mix
from dspark.bench.figures import Figure
from dspark.bench.interleaved import Blocks, Setting, Timing
from dspark.messages import Chunk, Model, Usage

_LOOK_S = 0.5
_ABORT_S = 1.0
"""For the requests that the block before has given up."""


class ServedSystem(ServerSystem["VllmClient"]):
    """See the module, and `systems.System`.

    Args:
        settings: as those of vLLM alone.
        port: of its API, on the loopback interface.
    """

    def __init__(self, name: str, settings: Settings, port: int) -> None:
        super().__init__(name)
        self._settings = settings
        self._port = port

    async def start(self) -> Figure:
        """See `System.start`."""
        process, log = await asyncio.to_thread(self._launch)
        self._client = VllmClient(f"http://127.0.0.1:{self._port}", self._settings.target)
        until_s = time.monotonic() + START_S
        while not await self._client.is_up():
            if process.poll() is not None or time.monotonic() > until_s:
                text = " ".join(log.read_text(errors="replace").split())
                raise Unavailable(f"{self.name}: {text[-600:]}")
            await asyncio.sleep(_LOOK_S)
        return {"arguments": self._arguments()[2:]}

    def _launch(self) -> tuple[subprocess.Popen[bytes], Path]:
        """The server, and its log."""
        require_free(self._port)
        self._folder = Path(tempfile.mkdtemp(prefix="dspark-engines-"))
        log = self._folder / "log"
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *self._arguments()],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=child_environment(
                    OMP_NUM_THREADS=str(self._settings.threads),
                    VLLM_CPU_OMP_THREADS_BIND=f"0-{self._settings.threads - 1}",
                    VLLM_NO_USAGE_STATS="1",
                    VLLM_LOGGING_LEVEL="WARNING",
                ),
            )
        return self._process, log

    def _arguments(self) -> list[str]:
        settings = self._settings
        values = {
            "model": settings.target,
            "host": "127.0.0.1",
            "port": self._port,
            "served-model-name": "target",
            "dtype": "float32",
            "max-model-len": settings.max_model_len,
            "max-num-seqs": settings.max_requests,
            "block-size": BLOCK_TOKENS,
            "num-gpu-blocks-override": settings.kv_tokens // BLOCK_TOKENS + 1,
            "kv-cache-memory-bytes": 4 << 30,
            "uvicorn-log-level": "warning",
        }
        named = [text for name, value in values.items() for text in (f"--{name}", str(value))]
        flags = ["--disable-log-stats"] + ([] if settings.compiled else ["--enforce-eager"])
        return [*named, *flags]

    async def measure(self, mix: Mix, *, repeat: int, users: int, timing: Timing) -> Figure:
        """See `System.measure`."""
        await asyncio.sleep(_ABORT_S)
        # All that blocks need of a client of ours, this one has.
        blocks = Blocks(cast("AsyncClient", self.client), mix, {})
        setting = Setting(name=self.name)
        return await blocks.measure(setting, repeat=repeat, users=users, timing=timing)


class VllmClient:
    """Of vLLM's completions, with the methods of `AsyncClient` that a load calls.

    Args:
        url: of the API server.
        target: folder of the model, for its chat template and tokenizer.
    """

    def __init__(self, url: str, target: Path) -> None:
        self._url = url
        self._text = load_text_model(target)
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
        )

    async def is_up(self) -> bool:
        """Whether the server answers."""
        with suppress(aiohttp.ClientError):
            async with self._session.get(f"{self._url}/health") as answer:
                return answer.status == 200
        return False

    async def set_scheduling(self, values: Mapping[str, Any]) -> dict[str, str]:
        """vLLM has none of ours."""
        assert not values, values
        return {}

    async def get_model(self) -> Model:
        """Without counters."""
        return Model(
            model="target", drafter="", max_model_len=0, vocab_size=0, verifiers=0, drafters=0,
            version="",
        )  # fmt: skip

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        max_tokens: int = 16,
        temperature: float = 0.0,
        **ours: Any,
    ) -> AsyncIterator[Chunk]:
        """One answer. What else our requests carry means nothing to vLLM; a seed its CPU build
        cannot take.

        Raises:
            Unavailable: it is refused, or breaks off.
        """
        del prompt, ours
        assert messages is not None, "prompts go in as chats"
        body = {
            "model": "target",
            "prompt": list(self._text.encode_chat([dict(message) for message in messages])),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stop_token_ids": list(self._text.eos_ids),
            "stream": True,
            "return_token_ids": True,
        }
        num_tokens = 0
        try:
            async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
                if answer.status != 200:
                    raise Unavailable(f"vLLM: {answer.status} {(await answer.text())[:300]}")
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        chunk = chunk_of(json.loads(line[len(b"data: ") :]))
                        num_tokens += len(chunk.token_ids)
                        ended = bool(chunk.finish_reason)
                        yield replace(chunk, usage=_usage(num_tokens)) if ended else chunk
        except aiohttp.ClientError as error:
            raise Unavailable(f"vLLM: {error}") from error

    async def close(self) -> None:
        """End the connections."""
        await self._session.close()


def _usage(num_tokens: int) -> Usage:
    """Of an answer that has ended: a token a round."""
    return Usage(
        prompt_tokens=0, completion_tokens=num_tokens, rounds=num_tokens - 1, proposed=0,
        verified=0, accepted=0, ttft_s=0.0, total_s=0.0, seed=0,
    )  # fmt: skip


def chunk_of(event: Mapping[str, Any]) -> Chunk:
    """What one event of a stream brings.

    Raises:
        Unavailable: it tells of an error.
    """
    if "choices" not in event:
        raise Unavailable(f"vLLM: {json.dumps(event)[:300]}")
    choice = event["choices"][0]
    return Chunk(
        text=choice["text"],
        token_ids=tuple(choice["token_ids"] or ()),
        logprobs=(),
        finish_reason=choice["finish_reason"] or "",
        usage=None,
    )
