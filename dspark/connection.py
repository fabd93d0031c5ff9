"""The server that a command talks to. Its token comes from DSPARK_TOKEN: arguments are no place for
secrets."""

from __future__ import annotations

import argparse

from dspark.client import DEFAULT_ADDRESS


def add_connection_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare where the server is."""
    parser.add_argument("--address", default=DEFAULT_ADDRESS, metavar="HOST:PORT")
    add_application_argument(parser)


def add_application_argument(parser: argparse.ArgumentParser) -> None:
    """Declare which of its applications is meant."""
    parser.add_argument(
        "--application", default="", metavar="NAME", help="where Ray Serve runs several"
    )
