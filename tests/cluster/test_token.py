"""Tokens that no call could carry are refused where they are read."""

from __future__ import annotations

import pytest

from cluster.config import load_config
from cluster.environment import auth_token, with_environment
from cluster.errors import ConfigError
from cluster.token import MAX_TOKEN_CHARS, check_token
from dspark.client import Client
from tests.frames import make_hello

BAD = {
    "secret\n": "character 7 of 7 is a newline",
    "sec\nret": "character 4 of 7 is a newline",
    "secret\r\n": "character 7 of 8 is a carriage return",
    "a\tb": "is a tab",
    "a\0b": "is a zero byte",
    "a\x1bb": "is a control character",
    "a\x7fb": "is a control character",
    "sécret": "character 2 of 6 is not ASCII",
    "a\udcffb": "is not ASCII",
    " secret": "starts or ends with a space",
    "secret ": "starts or ends with a space",
    "x" * (MAX_TOKEN_CHARS + 1): "has 257 characters",
}


@pytest.mark.parametrize("token", BAD, ids=list(map(repr, BAD)))
def test_bad_tokens(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=BAD[token]) as caught:
        check_token(token)
    assert caught.value.hint
    assert token not in str(caught.value), "a secret is not for error messages"
    with pytest.raises(ConfigError, match=r"cluster\.auth_token: the token"):
        load_config({"cluster": {"auth_token": token}})
    with pytest.raises(ConfigError, match=BAD[token]):
        Client(token=token)
    if "\0" in token:
        return  # no environment holds it
    monkeypatch.setenv("DSPARK_TOKEN", token)
    for read in (auth_token, lambda: with_environment(load_config(None)), Client):
        with pytest.raises(ConfigError, match="DSPARK_TOKEN: the token"):
            read()


@pytest.mark.parametrize("token", ["", "s", "a b!~", "x" * MAX_TOKEN_CHARS])
def test_good_tokens(token: str) -> None:
    from cluster.wire import decode, encode

    check_token(token)
    hello = make_hello(token=token)
    assert decode(encode(hello)) == hello, "frames carry all that is allowed"
