"""What `pareto.py` and `ablation.py` share: one server, settings by turns, a report that grows.

The report is written after every unit (all settings at one number of users, a few times), so that a
run that was stopped goes on where it was, and one with more repeats or other numbers of users adds
to it: units that the report holds are not measured again.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from growing import Report, add_mix_arguments, begin, in_time, mix_of, say

from cluster.atomic_file import write_bytes, write_json
from cluster.config import load_config
from dspark.async_client import AsyncClient
from dspark.bench.asks import Mix
from dspark.bench.interleaved import Blocks, Setting, Timing, Unit, units
from dspark.bench.turns import Turns

ALONE = 8
"""Cycles of settings in a load of their own."""
IN_BLOCKS = 8
"""Up to so many users settings are compared in blocks that start afresh and ask the same: what the
texts are like is most of the noise there, and starting takes little. With more users texts even
out and starting takes long: settings take turns under one load."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a script compares."""

    settings: Sequence[Setting]
    controls: Sequence[Setting] = ()
    """Compared with the first setting in blocks, also where the settings take turns: what differs
    in what is asked."""
    alone: Sequence[str] = ()
    """Settings that take turns in loads of their own besides, where nothing else teaches them."""
    users: Sequence[int]
    summarise: Callable[[list[dict[str, Any]]], dict[str, Any]]
    """Blocks to the report's ``summary``."""
    lines: Callable[[dict[str, Any]], Iterator[str]]
    """The summary as text."""
    draw: Callable[[Report], bytes]
    """The report as PNG."""


def add_arguments(parser: argparse.ArgumentParser, *, users: Sequence[int]) -> None:
    """Flags of both scripts."""
    parser.add_argument("--out", type=Path, required=True, metavar="JSON", help="goes on if there")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="nothing is begun that would end later"
    )
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--cycles", type=int, default=4, help="of all settings, in each repeat")
    parser.add_argument("--users", type=int, nargs="+", default=list(users))
    parser.add_argument("--settle", type=float, default=0.7, metavar="S", help="not counted")
    parser.add_argument("--measure", type=float, default=3.0, metavar="S", help="counted")
    parser.add_argument(
        "--per-user", type=float, default=0.03, metavar="S", help="more of both: steps get longer"
    )
    add_mix_arguments(parser)
    parser.add_argument("--config", type=Path, help="YAML of the server that is started")
    parser.add_argument("--port", type=int, default=9871, help="of the server that is started")
    parser.add_argument("--address", help="of a server that runs and nobody else uses")


def run(args: argparse.Namespace, comparison: Comparison) -> None:
    """Measure what the report lacks; print and draw what it says then."""
    report = begin(args.out, _plan(args, comparison))
    with _server(args) as address:
        asyncio.run(_measure(address, args, comparison, report))
    report["summary"] = comparison.summarise(report["blocks"])
    write_json(args.out, report)
    write_bytes(args.out.with_suffix(".png"), comparison.draw(report))
    for line in comparison.lines(report["summary"]):
        print(line)


def _plan(args: argparse.Namespace, comparison: Comparison) -> dict[str, Any]:
    return {
        "settings": [asdict(setting) for setting in comparison.settings],
        "controls": [asdict(setting) for setting in comparison.controls],
        "cycles": args.cycles,
        "timing_s": [args.settle, args.measure, args.per_user],
        "temperatures": args.temperature,
        "max_tokens": args.max_tokens,
        "prompts": args.prompts.name if args.prompts else "demo",
        "seed": args.seed,
    }


@contextmanager
def _server(args: argparse.Namespace) -> Iterator[str]:
    """The server's address; one of our own unless ``--address`` names one."""
    if args.address:
        yield args.address
        return
    from deploy.service import serving

    config = load_config(args.config)
    config = replace(
        config,
        cluster=replace(config.cluster, grpc_port=args.port),
        # All settings are asked the same prompts: which came first must not matter.
        verifier=replace(config.verifier, max_requests=max(args.users), prefix_cache=False),
    )

    def phase(name: str) -> None:
        print(f"  {name}", file=sys.stderr)

    with serving(config, ray_address="", phase=phase, report=lambda *_: None) as address:
        yield address


async def _measure(
    address: str, args: argparse.Namespace, comparison: Comparison, report: Report
) -> None:
    mix = mix_of(args)
    done = {(block["unit"], block["users"]) for block in report["blocks"]}
    plan = [
        unit
        for unit in units(comparison.settings, args.users, args.repeats, args.seed)
        if (unit.repeat, unit.users) not in done
    ]
    async with AsyncClient(address) as client:
        base = await client.get_scheduling()
        report["scheduling"] = base
        bench = _Bench(client, mix, base, args, comparison)
        for unit in in_time(plan, args.minutes):
            found = [block | {"unit": unit.repeat} async for block in bench.unit(unit)]
            report["blocks"] += found
            write_json(args.out, report)
        await client.set_scheduling(dict(base))


class _Bench:
    """Measures units."""

    def __init__(
        self,
        client: AsyncClient,
        mix: Mix,
        base: dict[str, str],
        args: argparse.Namespace,
        comparison: Comparison,
    ) -> None:
        self._blocks = Blocks(client, mix, base)
        self._turns = Turns(client, mix, base, comparison.settings)
        alone = [setting for setting in comparison.settings if setting.name in comparison.alone]
        self._alone = Turns(client, mix, base, alone)
        self._args = args
        self._comparison = comparison

    async def unit(self, unit: Unit) -> AsyncIterator[dict[str, Any]]:
        """All blocks of a unit."""
        args, comparison = self._args, self._comparison
        more_s = args.per_user * unit.users
        timing = Timing(settle_s=args.settle + more_s, measure_s=args.measure + more_s)
        if unit.users <= IN_BLOCKS:
            everything = [*comparison.settings, *comparison.controls]
            async for block in self._in_blocks(everything, unit, timing, args.cycles):
                yield block
            return
        async for block in self._by_turns(self._turns, unit, timing, args.cycles):
            yield block
        if comparison.alone:
            async for block in self._by_turns(self._alone, unit, timing, ALONE):
                yield block | {"alone": True}
        if comparison.controls:
            controls = [comparison.settings[0], *comparison.controls]
            async for block in self._in_blocks(controls, unit, timing, 1):
                yield block | {"control": True}

    async def _by_turns(
        self, turns: Turns, unit: Unit, timing: Timing, cycles: int
    ) -> AsyncIterator[dict[str, Any]]:
        async for found in turns.measure(
            repeat=unit.repeat, users=unit.users, cycles=cycles, timing=timing
        ):
            for block in found:
                say(block)
                yield block

    async def _in_blocks(
        self, settings: Sequence[Setting], unit: Unit, timing: Timing, cycles: int
    ) -> AsyncIterator[dict[str, Any]]:
        by_name = {setting.name: setting for setting in settings}
        for cycle in range(cycles):
            repeat = unit.repeat * self._args.cycles + cycle
            draw = random.Random(f"blocks/{self._args.seed}/{repeat}/{unit.users}")
            for name in draw.sample(sorted(by_name), len(by_name)):
                block = await self._blocks.measure(
                    by_name[name], repeat=repeat, users=unit.users, timing=timing
                )
                say(block)
                yield block
