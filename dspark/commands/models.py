"""`dspark models fetch NAME`, `dspark models list`."""

from __future__ import annotations

import argparse

from rich.console import Console

from cluster.model_store import EMBEDDED, cached, ensure_model
from dspark.progress import Phases


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    fetch = actions.add_parser("fetch", help="fetch a model and print its folder")
    fetch.add_argument("name", help="an embedded name, a local folder, or a hub id owner/name")
    actions.add_parser("list", help="list the embedded models")


def run(args: argparse.Namespace) -> int:
    """Fetch one model, or list the known ones."""
    if args.action == "fetch":
        with Phases(Console(stderr=True)) as phases:
            phases.phase(args.name)
            folder = ensure_model(args.name, phases.report)
        print(folder)
        return 0
    for model in EMBEDDED.values():
        state = cached(model.name) or "not fetched"
        print(f"{model.name}  {model.summary}  [{state}]")
    return 0
