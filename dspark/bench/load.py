"""Load: users who ask again as soon as they are answered, or arrivals that wait for nobody."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

from cluster.errors import DSparkError
from dspark.async_client import AsyncClient
from dspark.bench.asks import Ask, Mix
from dspark.bench.sample import Sample

_PAUSE_S: Final = 0.25
"""A user whose request failed waits before the next one: a full server is not asked in a spin."""


class Load:
    """Requests sent so far, while they are sent. Start it with `closed_loop` or `open_loop`.

    Args:
        client: to send with.
        mix: what is asked.
        raw: continue the prompts as plain text, without the chat template.
        clock: seconds.
    """

    def __init__(
        self, client: AsyncClient, mix: Mix, *, raw: bool = False, clock: Callable[[], float]
    ) -> None:
        self.samples: list[Sample] = []
        """In the order of their schedule."""
        self.errors: dict[str, DSparkError] = {}
        """The first of each name."""
        self.clock = clock
        self._client = client
        self._mix = mix
        self._raw = raw
        self._tasks: set[asyncio.Task[None]] = set()
        self._faults: list[BaseException] = []

    def check(self) -> None:
        """Raise what broke the load itself, if something did."""
        if self._faults:
            raise self._faults[0]

    async def use(self, user: int) -> None:
        """One user of a closed loop: asks, reads, asks again."""
        for turn in itertools.count():
            ask = self._mix.ask(user, turn, midway=turn == 0)
            sample = await self._send(ask, self.clock())
            if sample.error:
                await asyncio.sleep(_PAUSE_S)

    async def arrive(self, rate: float) -> None:
        """Poisson arrivals, so many a second, whatever has become of the earlier ones."""
        gaps = random.Random(f"arrivals/{self._mix.seed}")
        at_s = self.clock()
        for number in itertools.count():
            at_s += gaps.expovariate(rate)
            await asyncio.sleep(max(at_s - self.clock(), 0.0))
            self.spawn(self._arrival(self._mix.ask(0, number), at_s))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something until the load ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    async def stop(self) -> None:
        """Give up whatever runs."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _arrival(self, ask: Ask, scheduled_s: float) -> None:
        await self._send(ask, scheduled_s)

    async def _send(self, ask: Ask, scheduled_s: float) -> Sample:
        sample = Sample(ask=ask, scheduled_s=scheduled_s, sent_s=self.clock())
        self.samples.append(sample)
        text = ask.prompt.text
        messages = None if self._raw else [{"role": "user", "content": text}]
        generation = self._client.generate(
            text if self._raw else None, messages=messages, **ask.options
        )
        try:
            async for chunk in generation:
                sample.take(chunk, self.clock())
        except DSparkError as error:
            sample.error = type(error).__name__
            self.errors.setdefault(sample.error, error)
            sample.ended_s = self.clock()
        return sample

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._faults.append(fault)


@asynccontextmanager
async def closed_loop(
    client: AsyncClient,
    mix: Mix,
    *,
    users: int,
    raw: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> AsyncIterator[Load]:
    """So many users while the block runs; afterwards their requests are given up."""
    load = Load(client, mix, raw=raw, clock=clock)
    try:
        for user in range(users):
            load.spawn(load.use(user))
        yield load
    finally:
        await load.stop()


@asynccontextmanager
async def open_loop(
    client: AsyncClient,
    mix: Mix,
    *,
    rate: float,
    raw: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> AsyncIterator[Load]:
    """Poisson arrivals at ``rate`` a second while the block runs."""
    load = Load(client, mix, raw=raw, clock=clock)
    try:
        load.spawn(load.arrive(rate))
        yield load
    finally:
        await load.stop()
