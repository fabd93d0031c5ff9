"""The name of a Serve application: what it may consist of. It is a part of routes, a Ray namespace
and gRPC metadata."""

from __future__ import annotations

import re
from typing import Final

from cluster.errors import ConfigError

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


def check_application(name: str) -> None:
    """Refuse a name that Serve, Ray or gRPC would refuse later, less clearly.

    Raises:
        ConfigError: it is empty, or has other characters.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name[:64]!r} is no name of an application",
            hint="letters, digits, dots, dashes and underscores, at most 128",
        )
