"""What `pareto.py` and `ablation.py` share: one server, interleaved blocks, a report that grows.

The report is written after every unit (all settings at one number of users, once), so that a run
that was stopped goes on where it was: units that the report holds are not measured again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cluster.atomic_file import write_bytes, write_json
from cluster.config import load_config
from cluster.errors import ConfigError
from cluster.prompt_file import TextPrompt, read_prompts
from dspark.async_client import AsyncClient
from dspark.bench.asks import Mix
from dspark.bench.interleaved import Blocks, Setting, Timing, Unit, units
from dspark.demo.prompts import PROMPTS

Report = dict[str, Any]

LEAST_MEASURE_S = 3.0
START_S = 1.5
START_PER_USER_S = 0.3
"""First guess of what a block takes before it counts; measured from then on."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a script compares."""

    settings: Sequence[Setting]
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
    parser.add_argument("--minutes", type=float, default=25.0, help="for everything together")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--users", type=int, nargs="+", default=list(users))
    parser.add_argument("--settle", type=float, default=2.0, metavar="S", help="not counted")
    parser.add_argument("--prompts", type=Path, help="JSONL; default: those of the demo")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[64, 96, 128])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", type=Path, help="YAML of the server that is started")
    parser.add_argument("--port", type=int, default=9871, help="of the server that is started")
    parser.add_argument("--address", help="of a server that runs and nobody else uses")


def run(args: argparse.Namespace, comparison: Comparison) -> None:
    """Measure what the report lacks; print and draw what it says then."""
    report = _begin(args, comparison)
    with _server(args) as address:
        asyncio.run(_measure(address, args, comparison, report))
    report["summary"] = comparison.summarise(report["blocks"])
    write_json(args.out, report)
    write_bytes(args.out.with_suffix(".png"), comparison.draw(report))
    for line in comparison.lines(report["summary"]):
        print(line)


def _begin(args: argparse.Namespace, comparison: Comparison) -> Report:
    """A new report, or the one that stands at ``--out`` if it is of the same plan.

    Raises:
        ConfigError: it is of another one.
    """
    plan = {
        "settings": [asdict(setting) for setting in comparison.settings],
        "users": args.users,
        "temperatures": args.temperature,
        "max_tokens": args.max_tokens,
        "prompts": args.prompts.name if args.prompts else "demo",
        "settle_s": args.settle,
        "seed": args.seed,
    }
    fresh = {"machine": f"{os.cpu_count()} cores", "plan": plan, "blocks": []}
    if not args.out.exists():
        return fresh
    old: Report = json.loads(args.out.read_text())
    if old.get("plan") != json.loads(json.dumps(plan)):
        raise ConfigError(f"{args.out} is of another plan", hint="delete it, or name another file")
    return old


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
        verifier=replace(config.verifier, max_requests=max(args.users)),
    )

    def phase(name: str) -> None:
        print(f"  {name}", file=sys.stderr)

    with serving(config, ray_address="", phase=phase, report=lambda *_: None) as address:
        yield address


async def _measure(
    address: str, args: argparse.Namespace, comparison: Comparison, report: Report
) -> None:
    mix = Mix(
        prompts=_prompts(args.prompts),
        temperatures=args.temperature,
        max_tokens=args.max_tokens,
        seed=args.seed,
    )
    by_name = {setting.name: setting for setting in comparison.settings}
    done = {(block["repeat"], block["users"]) for block in report["blocks"]}
    plan = [
        unit
        for unit in units(comparison.settings, args.users, args.repeats, args.seed)
        if (unit.repeat, unit.users) not in done
    ]
    clock = _Budget(args.minutes * 60, args.settle)
    async with AsyncClient(address) as client:
        base = await client.get_scheduling()
        report["scheduling"] = base
        blocks = Blocks(client, mix, base)
        for place, unit in enumerate(plan):
            measure_s = clock.measure_s(plan[place:])
            found = []
            for name in unit.order:
                block = await blocks.measure(
                    by_name[name],
                    repeat=unit.repeat,
                    users=unit.users,
                    timing=Timing(settle_s=args.settle, measure_s=measure_s),
                )
                clock.took(unit.users, block["took_s"] - block["measured_s"] - args.settle)
                found.append(block)
                _say(block, clock.left_s(plan[place:], measure_s, len(found)))
            report["blocks"] += found
            write_json(args.out, report)
        await client.set_scheduling(dict(base))


def _say(block: dict[str, Any], left_s: float) -> None:
    print(
        f"repeat {block['repeat']}, {block['users']:3d} users, {block['setting']:<16s}"
        f"{block['tokens_per_s_total']:7.1f} tokens/s in all"
        f"{block['tokens_per_s_user']:7.2f} per user, {left_s / 60:4.0f} min left",
        flush=True,
    )


class _Budget:
    """Shares the time that is left out among the blocks that are left."""

    def __init__(self, total_s: float, settle_s: float) -> None:
        self._ends_s = time.monotonic() + total_s
        self._settle_s = settle_s
        self._start_s: dict[int, list[float]] = {}
        """By users: what blocks took before they counted."""

    def took(self, users: int, start_s: float) -> None:
        """A block is over."""
        self._start_s.setdefault(users, []).append(start_s)

    def measure_s(self, left: Sequence[Unit]) -> float:
        """Seconds to count of each block of these units."""
        num_blocks = sum(len(unit.order) for unit in left)
        spent_s = sum(len(unit.order) * self._before_s(unit.users) for unit in left)
        free_s = self._ends_s - time.monotonic() - spent_s
        return max(free_s / num_blocks, LEAST_MEASURE_S)

    def left_s(self, left: Sequence[Unit], measure_s: float, num_done: int) -> float:
        """Seconds to the end, ``num_done`` blocks of the first unit being over."""
        blocks = [unit.users for unit in left for _ in unit.order][num_done:]
        return sum(self._before_s(users) + measure_s for users in blocks)

    def _before_s(self, users: int) -> float:
        seen = self._start_s.get(users)
        start_s = sum(seen) / len(seen) if seen else START_S + START_PER_USER_S * users
        return start_s + self._settle_s


def _prompts(path: Path | None) -> list[TextPrompt]:
    if path is not None:
        return read_prompts(path)
    return [
        TextPrompt(text=p.text, source="demo", domain=p.name.partition(":")[0], where=p.name)
        for p in PROMPTS
    ]
