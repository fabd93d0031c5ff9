"""`dspark bench`: load a running server from a file of prompts, and say how it did."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from cluster.errors import ConfigError
from cluster.tiers import TIER_WEIGHTS
from dspark.connection import add_connection_arguments

if TYPE_CHECKING:
    from dspark.bench.asks import Mix
    from dspark.bench.measure import Measured, Plan, Progress
    from dspark.messages import Model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--prompts", type=Path, required=True, metavar="FILE", help="JSONL with prompt or turns"
    )
    add_connection_arguments(parser)
    shape = parser.add_mutually_exclusive_group(required=True)
    shape.add_argument(
        "--users", type=int, metavar="N", help="closed loop: each asks when answered"
    )
    shape.add_argument(
        "--rate", type=float, metavar="R", help="open loop: Poisson arrivals a second"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--duration", type=float, metavar="S", help="seconds that count; default 30"
    )
    length.add_argument("--requests", type=int, metavar="N", help="requests that count")
    parser.add_argument("--warm-up", type=float, default=5.0, metavar="S", help="seconds before")
    parser.add_argument(
        "--drain", type=float, default=60.0, metavar="S", help="wait for the last counted answers"
    )
    parser.add_argument(
        "--temperature", type=float, nargs="+", default=[0.0], metavar="T", help="mixed evenly"
    )
    parser.add_argument(
        "--mode",
        nargs="+",
        choices=("coupled", "rejection"),
        default=["coupled"],
        help="mixed evenly",
    )
    parser.add_argument(
        "--max-tokens", type=int, nargs="+", default=[128], metavar="N", help="mixed evenly"
    )
    parser.add_argument("--limit-per-source", type=int, metavar="N", help="first N prompts of each")
    parser.add_argument("--target-tokens-per-s", type=float, metavar="RATE", help="of each request")
    parser.add_argument("--tier", choices=tuple(TIER_WEIGHTS), default="", help="of each request")
    parser.add_argument(
        "--adapter", default="", metavar="NAME", help="LoRA adapter of each request"
    )
    parser.add_argument("--json-schema", type=Path, metavar="FILE", help="of each answer")
    parser.add_argument("--no-draft", action="store_false", dest="draft", help="plain decoding")
    parser.add_argument("--raw", action="store_true", help="no chat template: continue the text")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    parser.add_argument("--json", type=Path, metavar="OUT", help="report; OUT.png goes beside it")


def run(args: argparse.Namespace) -> int:
    """Measure, print the tables, write the report and the picture."""
    from cluster.atomic_file import write_json
    from dspark.bench.report import as_json, tables
    from dspark.report_file import check_writable

    plan, mix = plan_from(args), mix_from(args)
    if args.json is not None:
        check_writable(args.json, mark="load")
    console = Console()
    with _progress(Console(stderr=True)) as progress:
        measured, server, scheduling = asyncio.run(_measure(args, mix, plan, progress))
    for table in tables(measured.figures, _title(plan)):
        console.print(table)
    if args.json is not None:
        write_json(args.json, as_json(measured, plan, mix, args.prompts, server, scheduling))
        _draw(args.json.with_suffix(".png"), measured, _title(plan), console)
    return 0


def plan_from(args: argparse.Namespace) -> Plan:
    """How long and how hard. Raises `ConfigError`."""
    from dspark.bench.measure import Plan

    duration_s = 30.0 if args.duration is None and args.requests is None else args.duration
    return Plan(
        users=args.users,
        rate=args.rate,
        warm_up_s=args.warm_up,
        duration_s=duration_s,
        requests=args.requests,
        drain_s=args.drain,
        raw=args.raw,
    )


def mix_from(args: argparse.Namespace) -> Mix:
    """What is asked. Raises `PromptFileError`, `ConfigError` or `InvalidRequest`."""
    from cluster.prompt_file import read_prompts
    from dspark.bench.asks import Mix
    from dspark.constraint_options import read_text

    if args.limit_per_source is not None and args.limit_per_source < 1:
        raise ConfigError(f"--limit-per-source: {args.limit_per_source}", hint="at least 1")
    return Mix(
        prompts=read_prompts(args.prompts, limit_per_source=args.limit_per_source),
        temperatures=tuple(args.temperature),
        modes=tuple(args.mode),
        max_tokens=tuple(args.max_tokens),
        draft=args.draft,
        target_tokens_per_s=args.target_tokens_per_s,
        tier=args.tier,
        adapter=args.adapter,
        json_schema="" if args.json_schema is None else read_text(args.json_schema),
        seed=args.seed,
    )


async def _measure(
    args: argparse.Namespace, mix: Mix, plan: Plan, progress: Progress
) -> tuple[Measured, Model, dict[str, str]]:
    from dspark.async_client import AsyncClient
    from dspark.bench.measure import measure

    async with AsyncClient(args.address, application=args.application) as client:
        server, scheduling = await client.get_model(), await client.get_scheduling()
        return await measure(client, mix, plan, progress), server, scheduling


def _title(plan: Plan) -> str:
    shape = f"{plan.users} users" if plan.users is not None else f"{plan.rate:g} requests/s"
    return f"{shape}, measured after {plan.warm_up_s:g} s"


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from dspark.bench.load import Load
    from dspark.progress import erased_on_failure

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[counts]}"),
        TimeElapsedColumn(),
    )
    # The client shares the cores with what it measures: two looks a second are enough.
    bar = Progress(*columns, console=console, refresh_per_second=2, transient=True)
    with erased_on_failure(bar):
        task = bar.add_task("", total=1.0, counts="")

        def show(what: str, share: float, load: Load) -> None:
            over = sum(sample.ended_s is not None for sample in load.samples)
            failed = sum(bool(sample.error) for sample in load.samples)
            counts = f"{over} answered" + (f", {failed} failed" if failed else "")
            bar.update(task, description=what, completed=share, counts=counts)

        yield show


def _draw(path: Path, measured: Measured, title: str, console: Console) -> None:
    """The picture beside the report, or a word on why not."""
    what = f"report: {path.with_suffix('.json')}"
    if importlib.util.find_spec("matplotlib") is None:
        what += "; its picture needs matplotlib: pip install 'dspark-serve[train]'"
    else:
        from dspark.bench.pictures import draw_load

        path.write_bytes(draw_load(measured.samples, measured.counted, measured.window, title))
        what += f"; picture: {path}"
    console.print(what, highlight=False, markup=False, soft_wrap=True)
