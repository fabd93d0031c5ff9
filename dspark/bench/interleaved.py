"""Settings compared in one running server: short blocks in random order, paired within a repeat.

In each repeat and at each number of users, every setting is measured once, one right after the
other, in an order of its own. All of them are asked the same (`dspark.bench.asks`), and each starts
afresh: the users begin together, somewhere within their first answers, and the block counts from
the moment at which all of them have a token. What drifts (a noisy neighbour, a warm cache) meets
all settings of a repeat alike, and their ratios are taken repeat by repeat.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from cluster.errors import Unavailable
from dspark.async_client import AsyncClient
from dspark.bench.asks import Mix
from dspark.bench.figures import Figure, between_arrivals, rates
from dspark.bench.load import Load, closed_loop
from dspark.bench.measure import growth
from dspark.bench.sample import Window

_LOOK_S: Final = 0.05
_PATIENCE_S: Final = 120.0
"""A server that does not start, or end, a block's requests in this time is given up."""
_LIVE: Final = ("live", "queued", "in_lanes")
_COUNTERS: Final = (
    "num_steps", "num_verify_rows", "num_draft_asks", "num_drafts_gated", "num_proposed",
    "num_verified", "num_accepted", "num_emitted", "num_prefill_tokens", "num_late_drafts",
    "step_s", "predicted_step_s",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way of serving."""

    name: str
    scheduling: Mapping[str, str | float | bool] = field(default_factory=dict)
    """What differs from the server's scheduling as it was found."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """What differs in the requests: fields of `Mix`."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """All settings at one number of users, once or a few times: what is measured in one go."""

    repeat: int
    users: int
    order: tuple[str, ...]
    """Of the settings."""


def units(
    settings: Sequence[Setting], users: Sequence[int], repeats: int, seed: int
) -> Iterator[Unit]:
    """The whole plan; the same seed gives the same one."""
    for repeat in range(repeats):
        draw = random.Random(f"order/{seed}/{repeat}")
        for crowd in draw.sample(users, len(users)):
            names = [setting.name for setting in settings]
            draw.shuffle(names)
            yield Unit(repeat=repeat, users=crowd, order=tuple(names))


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of a block once all of its users have their first token."""

    settle_s: float
    """Not counted: estimates of the new setting come in."""
    measure_s: float


class Blocks:
    """Measures blocks in a server that nobody else uses.

    Args:
        client: of the server.
        mix: what is asked; each repeat draws from it anew.
        base: the scheduling that settings differ from, as `get_scheduling` told it.
    """

    def __init__(self, client: AsyncClient, mix: Mix, base: Mapping[str, str]) -> None:
        self._client = client
        self._mix = mix
        self._base = base

    async def measure(self, setting: Setting, *, repeat: int, users: int, timing: Timing) -> Figure:
        """One block. Rates as in `dspark.bench.figures.rates`.

        Raises:
            Unavailable: the server does not start the requests, or does not end them.
            DSparkError: a request failed.
        """
        began_s = time.perf_counter()
        await self._client.set_scheduling(dict(self._base) | dict(setting.scheduling))
        await until_idle(self._client)
        asked = dict(setting.asked) | {"seed": repeat_seed(self._mix.seed, repeat)}
        async with closed_loop(self._client, replace(self._mix, **asked), users=users) as load:
            await until_started(load, users)
            figures = await count(self._client, load, timing)
        return {
            "repeat": repeat,
            "users": users,
            "setting": setting.name,
            "took_s": time.perf_counter() - began_s,
            **figures,
        }


async def count(client: AsyncClient, load: Load, timing: Timing) -> Figure:
    """Settle, then tell what arrives, and what the router counts meanwhile.

    Raises:
        DSparkError: a request failed.
    """
    await _while_running(load, timing.settle_s)
    before, begin_s = await client.get_model(), load.clock()
    await _while_running(load, timing.measure_s)
    after, end_s = await client.get_model(), load.clock()
    window = between_arrivals(load.samples, Window(begin_s=begin_s, end_s=end_s))
    counters = growth(before, after)
    return {
        "settled_s": timing.settle_s,
        "measured_s": window.length_s,
        **rates(load.samples, window),
        "counters": {name: counters[name] for name in _COUNTERS if name in counters},
    }


async def until_idle(client: AsyncClient) -> None:
    """Wait until the requests of the load before are gone.

    Raises:
        Unavailable: they are not, after two minutes.
    """
    until_s = time.perf_counter() + _PATIENCE_S
    while True:
        metrics = (await client.get_model()).metrics
        if not any(metrics.get(name, 0.0) for name in _LIVE):
            return
        if time.perf_counter() > until_s:
            raise Unavailable("the server does not become idle", hint="does another use it?")
        await asyncio.sleep(_LOOK_S)


def repeat_seed(seed: int, repeat: int) -> int:
    """What a repeat asks, it draws from this."""
    return random.Random(f"repeat/{seed}/{repeat}").getrandbits(32)


async def until_started(load: Load, users: int) -> None:
    """Wait until every user has had a token.

    Raises:
        Unavailable: not all have, after two minutes.
        DSparkError: a request failed.
    """
    until_s = load.clock() + _PATIENCE_S
    while sum(bool(sample.chunk_s) for sample in load.samples[:users]) < users:
        _check(load)
        if load.clock() > until_s:
            raise Unavailable(f"not all of {users} requests start", hint="see max_requests")
        await asyncio.sleep(_LOOK_S)


async def _while_running(load: Load, duration_s: float) -> None:
    until_s = load.clock() + duration_s
    while (left_s := until_s - load.clock()) > 0:
        _check(load)
        await asyncio.sleep(min(left_s, 0.5))


def _check(load: Load) -> None:
    """A comparison in which requests fail compares nothing."""
    load.check()
    for error in load.errors.values():
        raise error
