"""The secret of a cluster, which goes in gRPC metadata and `Hello` frames: what it may be."""

from __future__ import annotations

from typing import Final

from cluster.errors import ConfigError

MAX_TOKEN_CHARS: Final = 256
_HINT: Final = "printable ASCII without a space at either end, e.g. from `openssl rand -hex 32`"


def check_token(token: str) -> None:
    """Refuse a token that would fail, or change, on its way. Never says what it is.

    Raises:
        ConfigError: it has a character that gRPC metadata cannot carry, a space at an end, which is
            lost there, or too many characters.
    """
    for place, character in enumerate(token):
        if not " " <= character <= "~":
            raise ConfigError(
                f"the token's character {place + 1} of {len(token)} is {_name(character)}, which "
                "no call can carry",
                hint=_HINT,
            )
    if token != token.strip():
        raise ConfigError("the token starts or ends with a space", hint=_HINT)
    if len(token) > MAX_TOKEN_CHARS:
        raise ConfigError(
            f"the token has {len(token)} characters", hint=f"at most {MAX_TOKEN_CHARS}"
        )


def _name(character: str) -> str:
    names = {"\n": "a newline", "\r": "a carriage return", "\t": "a tab", "\0": "a zero byte"}
    if character in names:
        return names[character]
    return "a control character" if character < " " or character == "\x7f" else "not ASCII"
