"""`dspark simulate`: the lanes that serve, over simulated engines on a virtual clock."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console

from cluster.errors import ConfigError
from dspark.progress import erased_on_failure
from dspark.report_file import check_folder, check_writable

if TYPE_CHECKING:
    from deploy.simulation.scenario import Run
    from deploy.simulation.sweep import Progress

_FILE_WIDTH: Final = 120
"""Columns of the table where no terminal says how wide it is."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--scenario",
        required=True,
        metavar="NAME",
        help="YAML file, or laptop, one_h100, two_pools, thousand",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a value, e.g. router.scheduling.gather=when_free; may be repeated",
    )
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="P",
        help="compare these budget policies in place of the scenario's variants",
    )
    parser.add_argument(
        "--points", type=float, nargs="+", metavar="N", help="load levels in place of its own"
    )
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="of cells")
    parser.add_argument("--json", type=Path, metavar="OUT", help="report")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="folder for pictures")


def run(args: argparse.Namespace) -> int:
    """Simulate, print the table, write report and pictures."""
    from cluster.atomic_file import write_json
    from deploy.simulation.summary import summary_table
    from deploy.simulation.sweep import report_of, simulate

    runs = runs_from(args)
    if args.json is not None:
        check_writable(args.json)
    if args.pictures is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--pictures needs matplotlib", hint="pip install 'dspark-serve[train]'")
    if args.pictures is not None:
        check_folder(args.pictures, "--pictures")
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    with _progress(Console(stderr=True)) as progress:
        tallies = simulate(runs, num_processes=args.processes, progress=progress)
    report = report_of(runs, tallies)
    console.print(summary_table(report))
    if args.json is not None:
        write_json(args.json, report)
    if args.pictures is not None:
        from cluster.atomic_file import write_bytes
        from deploy.simulation.pictures import draw_report

        for name, data in draw_report(report).items():
            write_bytes(args.pictures / f"{name}.png", data)
    return 0


def runs_from(args: argparse.Namespace) -> list[Run]:
    """What the arguments ask for.

    Raises:
        ConfigError: a value out of its domain.
    """
    import yaml

    from cluster.yaml_text import yaml_float
    from deploy.simulation.scenario import built_in, runs_of

    if args.processes < 1:
        raise ConfigError(f"--processes: {args.processes}", hint="at least 1")
    named = args.scenario.endswith((".yaml", ".yml"))
    path = Path(args.scenario) if named else built_in(args.scenario)
    settings = list(args.set)
    if args.points is not None:
        settings.append(f"points=[{', '.join(map(yaml_float, args.points))}]")
    if args.policy:
        variants = [{"name": p, "set": [f"router.scheduling.policy={p}"]} for p in args.policy]
        settings.append(f"variants={yaml.safe_dump(variants, default_flow_style=True)}")
    return runs_of(path, settings)


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    """A bar over all runs together, with the time that is left."""
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("simulating"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with erased_on_failure(Progress(*columns, console=console)) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda share: bar.update(task, advance=share)
        bar.update(task, completed=1.0)
