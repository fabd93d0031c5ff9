"""`dspark plan`: what to rent for given traffic, and what a million tokens then costs."""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console

from cluster.errors import ConfigError
from dspark.progress import erased_on_failure
from dspark.report_file import check_picture, check_writable

if TYPE_CHECKING:
    from deploy.simulation.plan_check import Progress

_FILE_WIDTH: Final = 120
"""Columns of the table where no terminal says how wide it is."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "plan",
        metavar="NAME",
        help="YAML file with traffic, promises, models, devices, prices; or chat_8b, an example",
    )
    parser.add_argument(
        "--check",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="play the cheapest pools of each way in the event simulator for so long, and the next "
        "cheapest where they break the promise",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="report")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="costs against load")


def run(args: argparse.Namespace) -> int:
    """Search, print the answer, write report and picture; 1 if no way keeps the promise, by the
    events if they were asked."""
    from cluster.atomic_file import write_bytes, write_json
    from deploy.simulation.plan import built_in, load_plan
    from deploy.simulation.plan_answer import answer, report_of
    from deploy.simulation.plan_table import answer_table, sentences

    if not 0 <= args.check < math.inf:
        raise ConfigError(f"--check: {args.check}", hint="seconds, 0 or more")
    named = args.plan.endswith((".yaml", ".yml"))
    plan = load_plan(Path(args.plan) if named else built_in(args.plan))
    if args.json is not None:
        check_writable(args.json)
    if args.picture is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError(
                "--picture needs matplotlib", hint="pip install 'dspark-serve[train]'"
            )
        check_picture(args.picture, "--picture")
    with _progress(Console(stderr=True)) as progress:
        found = answer(plan, progress, check_s=args.check)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    if any(offer.size is not None for offer in found.offers):
        console.print(answer_table(found))
    for sentence in sentences(found):
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    report = report_of(found)
    if args.json is not None:
        write_json(args.json, report)
    if args.picture is not None:
        from deploy.simulation.plan_pictures import draw_plan

        write_bytes(args.picture, draw_plan(report))
    return 0 if found.recommended() else 1


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    """A bar over the whole search."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with erased_on_failure(Progress(*columns, console=console)) as bar:
        task = bar.add_task("planning", total=1.0)
        yield lambda share, what: bar.update(task, advance=share, description=what)
