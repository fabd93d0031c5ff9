"""`dspark scheduling`: show how a server's lanes decide, and change it while they serve."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cluster.errors import ConfigError
from dspark.client import Client
from dspark.connection import add_connection_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a value of router.scheduling, e.g. policy=none or gate_drafts=false; "
        "may be repeated",
    )
    add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Change what was asked for, print everything that is in force then."""
    values = pairs(args.set)
    with Client(args.address, application=args.application) as client:
        scheduling = client.set_scheduling(values)
    for name, value in sorted(scheduling.items()):
        print(f"{name}={value}")
    if values:
        print("other routers follow within two heartbeats", file=sys.stderr)
    return 0


def pairs(texts: Sequence[str]) -> dict[str, str]:
    """Read ``KEY=VALUE`` texts.

    Raises:
        ConfigError: one that is none, or a key that comes twice.
    """
    values: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ConfigError(f"--set {text}: expected KEY=VALUE", hint="e.g. --set policy=none")
        if key in values:
            raise ConfigError(f"--set {text}: {key} is set twice")
        values[key] = value
    return values
