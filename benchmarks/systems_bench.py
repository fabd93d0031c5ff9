"""Blocks of `engines.py`: each system of a unit in turn, the others held."""

from __future__ import annotations

import argparse
import asyncio
import os
import time

import decode_bound
from growing import Report, say
from systems import OurSystem, System, cpu_s, hold, let_go

from cluster.errors import DSparkError
from dspark.bench.asks import Mix
from dspark.bench.figures import Figure
from dspark.bench.interleaved import Timing, Unit

WARM_UP = Timing(settle_s=0.0, measure_s=8.0)
AWAKE_S = 5.0
"""For what piled up in a system while it was held: heartbeats, health checks. HAProxy takes routers
that stood still for dead, until they have answered again."""


class Bench:
    """Measures units.

    Args:
        systems: started and held, by name; one that fails is closed and taken out.
        args: the script's.
        report: gets probes and failures.
    """

    def __init__(
        self, systems: dict[str, System], mix: Mix, args: argparse.Namespace, report: Report
    ) -> None:
        self._systems = systems
        self._report = report
        self._mix = mix
        self._args = args
        self._warm: set[str] = set()

    async def unit(self, unit: Unit) -> list[Figure]:
        """A block of every system that runs; with one user also a probe of the bound of ours."""
        found = []
        for name in unit.order:
            if (system := self._systems.get(name)) is None:
                continue
            let_go(system)
            await asyncio.sleep(AWAKE_S)
            try:
                await self._warm_up(system)
                found.append(await self._block(system, unit))
                if unit.users == 1 and isinstance(system, OurSystem):
                    probes = self._report.setdefault("probes", {}).setdefault(name, [])
                    probes.append(await self._probe(system, unit))
            except DSparkError as error:
                where = f"repeat {unit.repeat}, {unit.users} users"
                self._report["failures"][name] = f"{where}: {error}"
                print(f"{name} fails and is left out from here on: {error}", flush=True)
                await self._systems.pop(name).close()
            else:
                hold(system)
        return found

    async def _warm_up(self, system: System) -> None:
        """Nobody's first block pays for caches, allocators and estimates that are empty."""
        if system.name not in self._warm:
            users = min(4, max(self._args.concurrency))
            await system.measure(self._mix, repeat=-1, users=users, timing=WARM_UP)
            self._warm.add(system.name)

    async def _block(self, system: System, unit: Unit) -> Figure:
        more_s = self._args.per_user * unit.users
        timing = Timing(settle_s=self._args.settle + more_s, measure_s=self._args.measure + more_s)
        others = [other for other in self._systems.values() if other is not system]
        before_s, others_s = cpu_s(system), sum(map(cpu_s, others))
        began_s = time.monotonic()
        block = await system.measure(self._mix, repeat=unit.repeat, users=unit.users, timing=timing)
        took_s = time.monotonic() - began_s
        block |= {
            "cpu": (cpu_s(system) - before_s) / took_s,
            "others_cpu": (sum(map(cpu_s, others)) - others_s) / took_s,
            "load": os.getloadavg()[0],
        }
        say(block)
        return block

    async def _probe(self, system: OurSystem, unit: Unit) -> Figure:
        num_answers = self._args.answers
        return await decode_bound.probe(
            system.client, self._mix, repeat=unit.repeat, num_answers=num_answers
        )
