"""`dspark export CHECKPOINT`: write a drafter in another library's format."""

from __future__ import annotations

import argparse
from pathlib import Path

from cluster.errors import ConfigError
from cluster.model_store import ensure_drafter, ensure_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "checkpoint",
        help="a drafter folder, hub id or bundled name, or default: the one shipped for the target",
    )
    parser.add_argument("--target", required=True, help="the model that it drafts for")
    parser.add_argument("--format", required=True, choices=("speculators", "deepspec"))
    parser.add_argument("--output", required=True, type=Path, metavar="DIR")
    parser.add_argument(
        "--verifier",
        default="",
        metavar="NAME",
        help="folder or hub id to record for the target (speculators); default: its folder here",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace a drafter that is in DIR already"
    )


def run(args: argparse.Namespace) -> int:
    """Export, and say where to and what was left out."""
    if args.verifier and args.format != "speculators":
        raise ConfigError("--verifier: only the speculators format records the target")
    target = ensure_model(args.target)
    checkpoint = ensure_drafter(args.checkpoint, args.target)
    if not isinstance(checkpoint, Path):
        raise ConfigError(f"checkpoint: {args.checkpoint!r} has no weights to export")
    from drafter_service.export import export_drafter

    exported = export_drafter(
        checkpoint,
        target,
        args.output,
        format=args.format,
        verifier=args.verifier,
        force=args.force,
    )
    for note in exported.notes:
        print(f"note: {note}")
    print(f"drafter written to {exported.folder} in the {args.format} format")
    return 0
