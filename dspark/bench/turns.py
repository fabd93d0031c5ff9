"""Settings that take turns of some seconds under one load that never stops.

`dspark.bench.interleaved` starts every setting afresh; on a machine whose speed drifts, blocks of
ten seconds that lie a minute apart differ by more than what is to be told apart. Here the users go
on asking while the server's scheduling is switched every few seconds, in an order drawn anew for
each cycle; what follows a switch is not counted, and ratios are taken cycle by cycle. Only what can
be switched between two steps can be compared so: scheduling, not what requests ask for.

A setting finds what earlier turns of its own have taught, and what all of them have taught the
profiles and the draft gate: it is compared as it is after a while, not as it starts, and one that
rarely drafts knows more than by itself. Two settings in a load of their own say whether it matters.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cluster.errors import ConfigError
from dspark.async_client import AsyncClient
from dspark.bench.asks import Mix
from dspark.bench.figures import Figure
from dspark.bench.interleaved import (
    Setting,
    Timing,
    count,
    repeat_seed,
    until_idle,
    until_started,
)
from dspark.bench.load import closed_loop


class Turns:
    """Measures settings by turns in a server that nobody else uses.

    Args:
        client: of the server.
        mix: what is asked.
        base: the scheduling that settings differ from, as `get_scheduling` told it.
        settings: what takes turns.

    Raises:
        ConfigError: a setting differs in what is asked.
    """

    def __init__(
        self,
        client: AsyncClient,
        mix: Mix,
        base: Mapping[str, Any],
        settings: Sequence[Setting],
    ) -> None:
        for setting in settings:
            if setting.asked:
                raise ConfigError(
                    f"setting {setting.name!r} asks otherwise: it cannot take turns",
                    hint="compare it in blocks of its own",
                )
        self._client = client
        self._mix = mix
        self._base = base
        self._settings = {setting.name: setting for setting in settings}

    async def measure(
        self, *, repeat: int, users: int, cycles: int, timing: Timing
    ) -> AsyncIterator[list[Figure]]:
        """One load of so many users; yields a cycle's figures at a time, as `Blocks.measure` has
        them. ``repeat`` in them numbers the cycle over all loads, for its figures are a pair.

        Raises:
            Unavailable: the server does not start the requests, or is in use.
            DSparkError: a request failed.
        """
        draw = random.Random(f"turns/{self._mix.seed}/{repeat}/{users}")
        await self._client.set_scheduling(dict(self._base))
        await until_idle(self._client)
        mix = replace(self._mix, seed=repeat_seed(self._mix.seed, repeat))
        async with closed_loop(self._client, mix, users=users) as load:
            await until_started(load, users)
            for cycle in range(cycles):
                found = []
                for name in draw.sample(sorted(self._settings), len(self._settings)):
                    began_s = load.clock()
                    changes = self._settings[name].scheduling
                    await self._client.set_scheduling(dict(self._base) | dict(changes))
                    figures = await count(self._client, load, timing)
                    label = {
                        "repeat": repeat * cycles + cycle,
                        "load": repeat,
                        "users": users,
                        "setting": name,
                    }
                    found.append(label | figures | {"took_s": load.clock() - began_s})
                yield found
