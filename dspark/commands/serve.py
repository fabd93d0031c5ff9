"""`dspark serve`: run the service until Ctrl-C."""

from __future__ import annotations

import argparse
import threading

from rich.console import Console

from dspark.configuration import add_config_arguments, config_from
from dspark.progress import Phases


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config_arguments(parser)
    parser.add_argument(
        "--ray",
        default="",
        metavar="ADDRESS",
        help="join the Ray at ADDRESS ('auto' finds a local one) instead of starting one",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted; then stop what was started."""
    config = config_from(args)
    from deploy.service import serving

    console = Console(stderr=True)
    phases = Phases(console)
    with (
        phases,
        serving(config, ray_address=args.ray, phase=phases.phase, report=phases.report) as address,
    ):
        phases.done()
        console.print(f"serving {config.model.target} on {address}; Ctrl-C stops", highlight=False)
        if not config.cluster.auth_token:
            console.print(
                "warning: the gRPC port listens on every interface and no token is set "
                "(DSPARK_TOKEN)",
                highlight=False,
            )
        threading.Event().wait()
    return 0
