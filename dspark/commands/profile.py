"""`dspark profile`: step times of a replica here, or of the verifiers of a running server."""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from cluster.config import Config, load_config
from cluster.environment import use_threads, with_environment
from cluster.errors import ConfigError
from cluster.profile_snapshot import ProfileSnapshot
from dspark.connection import add_application_argument
from dspark.profile_tables import cost_table, figures, gaps, link_table, tier_table
from dspark.report_file import check_writable

_FILE_WIDTH: Final = 120
"""Columns of the tables where no terminal says how wide it is."""
_MARK: Final = "verifiers"
_STEPS_S: Final = 20.0
_OF_A_REPLICA: Final = (
    "config", "engine", "drafter", "device", "threads", "budget", "steps", "seed",
)  # fmt: skip
"""Flags that say nothing to a server."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--target", metavar="NAME", help="measure this model here (model.target)")
    which.add_argument("--address", metavar="HOST:PORT", help="show the tables of this server")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the tables to OUT")
    parser.add_argument("--picture", type=Path, metavar="OUT", help="draw them to OUT, a PNG")
    add_application_argument(parser)
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML of the replica")
    parser.add_argument("--engine", help="verifier.engine")
    parser.add_argument(
        "--drafter",
        metavar="NAME",
        help="whose projection the steps include (default: the configuration file's, else none)",
    )
    parser.add_argument("--device", help="model.device")
    parser.add_argument("--threads", type=int, metavar="N", help="verifier.num_threads")
    parser.add_argument(
        "--budget", type=float, metavar="S", help="seconds to measure (verifier.profile_budget_s)"
    )
    parser.add_argument(
        "--steps",
        type=float,
        metavar="S",
        help=f"seconds of steps to predict (default: {_STEPS_S:.0f})",
    )
    parser.add_argument("--seed", type=int, help="of those steps (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Measure or ask, print, write, draw."""
    _check(args)
    report = _ask(args) if args.address is not None else _measure(args)
    profiles = [
        (str(item["verifier"]), ProfileSnapshot.from_json(item["profile"]))
        for item in _verifiers(report)
    ]
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    _show(console, profiles, report.get("drafters") or [])
    for line in gaps(report):
        print(line, file=sys.stderr)
    if args.json is not None:
        from cluster.atomic_file import write_json

        write_json(args.json, report)
    if args.picture is not None:
        from cluster.atomic_file import write_bytes
        from deploy.profile_picture import draw_profiles

        write_bytes(args.picture, draw_profiles(profiles))
    return 0


def config_from(args: argparse.Namespace) -> Config:
    """The replica that the arguments describe: file, environment, flags.

    Raises:
        ConfigError: a value out of its domain.
    """
    base = with_environment(load_config(args.config))
    drafter = "none" if args.drafter is None and args.config is None else args.drafter
    given: dict[str, dict[str, Any]] = {
        "model": {"target": args.target, "device": args.device},
        "verifier": {
            "engine": args.engine,
            "num_threads": args.threads,
            "profile_budget_s": args.budget,
        },
        "drafter": {"checkpoint": drafter},
    }
    # Parsed like a file, so that bad values are refused with the name of their key.
    flags = {
        section: {key: value for key, value in values.items() if value is not None}
        for section, values in given.items()
    }
    checked = load_config(flags)
    return replace(
        base,
        **{
            section: replace(
                getattr(base, section),
                **{key: getattr(getattr(checked, section), key) for key in values},
            )
            for section, values in flags.items()
        },
    )


def _check(args: argparse.Namespace) -> None:
    """Flags that do not go together, and outputs that cannot be written, before the work.

    Raises:
        ConfigError: there are some.
    """
    given = [name for name in _OF_A_REPLICA if getattr(args, name) is not None]
    if args.address is not None and given:
        raise ConfigError(f"--{given[0]} is for a replica here", hint="use it with --target")
    if args.target is not None and args.application:
        raise ConfigError("--application is for a server", hint="use it with --address")
    if args.json is not None:
        check_writable(args.json, mark=_MARK)
    if args.picture is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError(
                "--picture needs matplotlib", hint="pip install 'dspark-serve[train]'"
            )
        if args.picture.suffix != ".png" or not args.picture.parent.is_dir():
            raise ConfigError(
                f"--picture: {args.picture}", hint="a file that ends in .png, in a folder"
            )
    if args.steps is not None and not 0 <= args.steps < math.inf:
        raise ConfigError(f"--steps: {args.steps} is no time")


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    """The replica here, in the form of a server's answer."""
    config = config_from(args)
    num_threads = use_threads(config.verifier.num_threads)
    import torch

    torch.set_num_threads(num_threads)
    from deploy.replica_profile import profile_replica

    console = Console(stderr=True)
    snapshot = profile_replica(
        config,
        steps_s=_STEPS_S if args.steps is None else args.steps,
        seed=args.seed or 0,
        tell=lambda line: console.print(line, highlight=False, markup=False),
    )
    return {_MARK: [{"verifier": args.target, "profile": snapshot.to_json()}], "drafters": []}


def _ask(args: argparse.Namespace) -> dict[str, Any]:
    """The server's live tables."""
    from dspark.client import Client

    with Client(args.address, application=args.application) as client:
        return client.get_profile()


def _verifiers(report: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    found = report.get(_MARK)
    if not isinstance(found, list) or not all(
        isinstance(item, dict) and item.keys() >= {"verifier", "profile"} for item in found
    ):
        raise ConfigError("the answer holds no profiles", hint="is the server of another release?")
    return found


def _show(
    console: Console,
    profiles: Sequence[tuple[str, ProfileSnapshot]],
    drafters: Sequence[Mapping[str, Any]],
) -> None:
    if not profiles:
        console.print("no router leads a verifier", highlight=False)
    for name, profile in profiles:
        console.print(tier_table(name, profile))
        console.print(cost_table(profile))
        for line in figures(profile):
            console.print(line, highlight=False, markup=False)
        console.print()
    if drafters:
        console.print(link_table(drafters))
