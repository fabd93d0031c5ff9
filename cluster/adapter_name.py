"""The name of a LoRA adapter: what it may consist of, in the configuration and in a request."""

from __future__ import annotations

import re
from typing import Final

from cluster.errors import ConfigError, UnknownAdapter

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,127}", re.ASCII)
_RULE: Final = "letters, digits and ._-/:@, at most 128, a letter or digit first"


def check_adapter(name: str) -> None:
    """Refuse a request for an adapter that no configuration can name; empty asks for none.

    Raises:
        UnknownAdapter: it is no name. Whether there is such an adapter, the engine knows.
    """
    if name and not _NAME.fullmatch(name):
        raise UnknownAdapter(f"{name[:64]!r} is no name of an adapter", hint=_RULE)


def check_adapter_key(name: str) -> None:
    """Refuse a name under which no request could ask for the adapter.

    Raises:
        ConfigError: it is empty, or has other characters.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name[:64]!r} is no name of an adapter", hint=_RULE)
