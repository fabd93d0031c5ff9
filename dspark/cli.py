"""The `dspark` command. Subcommands import what they need when they run."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from types import FrameType
from typing import Final

from cluster.errors import DSparkError

_COMMANDS: Final = {
    "serve": ("dspark.commands.serve", "serve a model until Ctrl-C"),
    "generate": ("dspark.commands.generate", "send one prompt to a server and print the answer"),
    "scheduling": ("dspark.commands.scheduling", "show and change how a server's lanes decide"),
    "bench": ("dspark.commands.bench", "measure a running server under load"),
    "profile": ("dspark.commands.profile", "measure or show how long a verifier's steps take"),
    "demo": ("dspark.demo.command", "serve locally, decode twelve prompts with and without drafts"),
    "models": ("dspark.commands.models", "fetch and list models"),
    "calibrate": ("dspark.commands.calibrate", "fit a drafter's confidence to held-out rounds"),
    "train": ("dspark.commands.train", "train a drafter for a target"),
    "eval": ("dspark.commands.eval", "measure drafters on a file of prompts"),
    "simulate": ("dspark.commands.simulate", "play a cluster on a virtual clock"),
    "plan": ("dspark.commands.plan", "find the cheapest pools for given traffic and promises"),
    "export": ("dspark.commands.export", "write a drafter in another format"),
}
"""Modules with ``add_arguments(parser)`` and ``run(args) -> int``."""


class _Help(argparse.HelpFormatter):
    """Adds the default of every flag that has one and does not speak of it itself."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        silent = default is None or default is False or default in ("", [], argparse.SUPPRESS)
        if silent or "default" in text or not action.option_strings:
            return text
        shown = " ".join(map(str, default)) if isinstance(default, list) else str(default)
        return f"{text} (default: {shown.replace('%', '%%')})"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status: 2 for a mistake or failure, 130 for Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="dspark", description="Speculative decoding on Ray Serve")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((word for word in arguments if not word.startswith("-")), "")
    for name, (module, summary) in _COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary, formatter_class=_Help)
        if name == chosen:  # only the chosen one's module is imported
            importlib.import_module(module).add_arguments(sub)
    commands.add_parser("version", help="print the version")
    args = parser.parse_args(arguments)
    if args.command == "version":
        print(version("dspark-serve"))
        return 0
    return _guarded(args)


def _guarded(args: argparse.Namespace) -> int:
    """Run the command; a failure is one line and a hint, whatever the cause."""
    signal.signal(signal.SIGTERM, _interrupt)  # so that `finally` clauses run
    try:
        status: int = importlib.import_module(_COMMANDS[args.command][0]).run(args)
        sys.stdout.flush()
    except DSparkError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a file that nobody thought of: no access, no room, a silly name
        named = f"{str(error.filename)[:200]}: " if error.filename else ""
        print(f"error: {named}{error.strerror or error}", file=sys.stderr)
        return 2
    return status


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
