"""What the benchmarks that compare under load share: what is asked, and a report that grows.

A report is written after every unit; a run that was stopped, or has more repeats, goes on with what
its report lacks.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError
from cluster.prompt_file import TextPrompt, read_prompts
from dspark.bench.asks import Mix
from dspark.bench.interleaved import Unit
from dspark.demo.prompts import PROMPTS

Report = dict[str, Any]


def add_mix_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `mix_of`."""
    parser.add_argument("--prompts", type=Path, help="JSONL; default: those of the demo")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[64, 96, 128])
    parser.add_argument("--seed", type=int, default=0)


def mix_of(args: argparse.Namespace) -> Mix:
    """What is asked."""
    return Mix(
        prompts=_prompts(args.prompts),
        temperatures=args.temperature,
        max_tokens=args.max_tokens,
        seed=args.seed,
    )


def begin(out: Path, plan: Mapping[str, Any]) -> Report:
    """A new report, or the one that stands at ``out`` if it is of the same plan.

    Raises:
        ConfigError: it is of another one.
    """
    fresh = {"machine": f"{os.cpu_count()} cores", "plan": dict(plan), "blocks": []}
    if not out.exists():
        return fresh
    old: Report = json.loads(out.read_text())
    if old.get("plan") != json.loads(json.dumps(plan)):
        raise ConfigError(f"{out} is of another plan", hint="delete it, or name another file")
    return old


def in_time(plan: Sequence[Unit], minutes: float) -> Iterator[Unit]:
    """The units one by one, as long as the next one is expected to end in time; the first always.
    Says what is left."""
    began_s = time.monotonic()
    for place, unit in enumerate(plan):
        taken_s = time.monotonic() - began_s
        if place and taken_s * (place + 1) / place > minutes * 60:
            print(f"{len(plan) - place} units are left; go on with the same command")
            return
        left_s = taken_s / place * (len(plan) - place) if place else 0.0
        left = f", about {left_s / 60:.0f} min left" if place else ""
        print(f"repeat {unit.repeat}, {unit.users} users{left}", flush=True)
        yield unit


def say(block: Mapping[str, Any]) -> None:
    """A block in a line."""
    print(
        f"{block['repeat']:5d} {block['users']:3d} users, {block['setting']:<16s}"
        f"{block['tokens_per_s_total']:7.1f} tokens/s in all"
        f"{block['tokens_per_s_user']:7.2f} per user",
        flush=True,
    )


def _prompts(path: Path | None) -> list[TextPrompt]:
    if path is not None:
        return read_prompts(path)
    return [
        TextPrompt(text=p.text, source="demo", domain=p.name.partition(":")[0], where=p.name)
        for p in PROMPTS
    ]
