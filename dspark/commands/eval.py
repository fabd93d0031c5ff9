"""`dspark eval`: accepted length and confidence of drafters on a file of prompts."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console

from cluster.environment import use_threads
from cluster.errors import ConfigError
from dspark.progress import erased_on_failure
from dspark.report_file import check_writable, remove_pictures

if TYPE_CHECKING:  # torch must see the number of threads first
    from deploy.offline.evaluation import Plan, Progress
    from deploy.offline.report import Report

_LONGER: Final = "longer answers: --max-new-tokens"
_FILE_WIDTH: Final = 120
"""Columns of the tables where no terminal says how wide it is."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--prompts", type=Path, required=True, metavar="FILE", help="JSONL with prompt or turns"
    )
    parser.add_argument(
        "--drafter",
        action="append",
        required=True,
        metavar="NAME",
        help="bundled name, checkpoint folder, hub id, or ngram; may be repeated",
    )
    parser.add_argument(
        "--temperature", type=float, nargs="+", default=[0.0, 1.0], metavar="T", help="0 is greedy"
    )
    parser.add_argument(
        "--json", type=Path, required=True, metavar="OUT", help="report; pictures go beside it"
    )
    parser.add_argument(
        "--mode",
        choices=("coupled", "rejection", "both"),
        default="both",
        help="how drafts are accepted above temperature 0",
    )
    parser.add_argument("--target", default="smollm2-135m", help="as model.target")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="per answer")
    parser.add_argument("--limit-per-source", type=int, metavar="N", help="first N prompts of each")
    parser.add_argument("--concurrency", type=int, default=32, metavar="N", help="requests at once")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling")
    parser.add_argument(
        "--batch-sizes",
        type=int,
        nargs="+",
        default=[],
        metavar="B",
        help="also try these bounds of the drafter's batch, in the first regime",
    )
    parser.add_argument(
        "--batch-prompts", type=int, default=64, metavar="N", help="prompts of those runs"
    )
    parser.add_argument(
        "--raw-confidence", action="store_true", help="leave the drafter's calibration out"
    )
    parser.add_argument("--device", default="auto", help="as model.device")
    parser.add_argument(
        "--threads", type=int, default=0, metavar="N", help="of torch; 0: all cores"
    )


def run(args: argparse.Namespace) -> int:
    """Evaluate, print the tables, write the report and the pictures."""
    num_threads = use_threads(args.threads)
    import torch

    torch.set_num_threads(num_threads)
    from cluster.atomic_file import write_json
    from deploy.offline.tables import report_tables

    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    report = _evaluate(args, Console(stderr=True))
    if not report["rows"]:
        raise ConfigError("every answer was one token: no round to measure", hint=_LONGER)
    for table in report_tables(report):
        console.print(table)
    write_json(args.json, report)
    remove_pictures(args.json)
    _write_pictures(args.json, report, console)
    if report["lost_sessions"]:
        _say(
            console,
            f"warning: {report['lost_sessions']} draft sessions were lost; those requests went "
            "on without drafts, so the figures are too low",
        )
    return 0


def plan_from(args: argparse.Namespace) -> Plan:
    """What the arguments ask for.

    Raises:
        ConfigError, BadSamplingParameter: a value out of its domain.
    """
    from cluster.sampling import MODES
    from deploy.offline.evaluation import Plan

    return Plan(
        drafters=tuple(args.drafter),
        temperatures=tuple(args.temperature),
        modes=MODES if args.mode == "both" else (args.mode,),
        max_new_tokens=args.max_new_tokens,
        concurrency=args.concurrency,
        seed=args.seed,
        batch_sizes=tuple(args.batch_sizes),
        batch_prompts=args.batch_prompts,
    )


def _evaluate(args: argparse.Namespace, console: Console) -> Report:
    """Everything that can be wrong is found first, then the models are loaded and run."""
    from cluster.fingerprint import folder_fingerprint
    from cluster.model_store import ensure_model
    from deploy.offline.evaluation import measure
    from deploy.offline.opening import kv_tokens_for, resolve_drafter
    from deploy.offline.prompts import load_prompts
    from deploy.offline.report import make_report
    from deploy.offline.rounds import LocalPair
    from deploy.text_model import load_text_model

    plan = plan_from(args)
    if args.limit_per_source is not None and args.limit_per_source < 1:
        raise ConfigError(f"--limit-per-source: {args.limit_per_source}", hint="at least 1")
    check_writable(args.json)
    target = ensure_model(args.target)
    text = load_text_model(target)
    prompts = load_prompts(args.prompts, text, limit_per_source=args.limit_per_source)
    sources = {name: resolve_drafter(name, args.target) for name in plan.drafters}

    kv_tokens = kv_tokens_for(
        prompts,
        max_new_tokens=plan.max_new_tokens,
        max_positions=text.max_positions,
        concurrency=plan.concurrency,
    )

    def open_pair(name: str) -> LocalPair:
        return LocalPair.open(
            target,
            sources[name],
            calibrated=not args.raw_confidence,
            device=args.device,
            kv_tokens=kv_tokens,
        )

    measured = []
    with _progress(console, plan.num_tokens(len(prompts))) as progress:
        for one in measure(plan, prompts, open_pair, progress):
            measured.append(one)
            _say(console, one.summary)
    setup = {
        "target": args.target,
        "target_fingerprint": folder_fingerprint(target),
        "prompts": str(args.prompts),
        "num_prompts": len(prompts),
        "calibrated": not args.raw_confidence,
    }
    return make_report(plan, measured, setup)


@contextmanager
def _progress(console: Console, num_tokens: int) -> Iterator[Progress]:
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
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with erased_on_failure(Progress(*columns, console=console)) as bar:
        task = bar.add_task("loading", total=num_tokens)

        def show(what: str, tokens: int) -> None:
            bar.update(task, description=what, advance=tokens)

        yield show


def _write_pictures(path: Path, report: Report, console: Console) -> None:
    """``OUT-NAME.png`` beside the report, or a word on why not."""
    if importlib.util.find_spec("matplotlib") is None:
        _say(
            console, f"report: {path}; pictures need matplotlib: pip install 'dspark-serve[train]'"
        )
        return
    from cluster.atomic_file import write_bytes
    from deploy.offline.pictures import draw_report

    names = []
    for name, data in draw_report(report).items():
        picture = path.with_name(f"{path.stem}-{name}.png")
        write_bytes(picture, data)
        names.append(picture.name)
    beside = f"; pictures beside it: {', '.join(names)}" if names else ""
    _say(console, f"report: {path}{beside}")


def _say(console: Console, line: str) -> None:
    """A line as it is: paths are copied from it."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)
