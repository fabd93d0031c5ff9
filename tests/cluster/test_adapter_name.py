"""Names of adapters, in a configuration and in a request."""

from __future__ import annotations

import pytest

from cluster.adapter_name import check_adapter, check_adapter_key
from cluster.errors import ConfigError, UnknownAdapter


@pytest.mark.parametrize("name", ["sql", "org/name-v1.2", "a:b@c_d", "7", "x" * 128])
def test_names(name: str) -> None:
    check_adapter(name)
    check_adapter_key(name)


@pytest.mark.parametrize("name", [" ", "a b", "-a", "é", "a\n", "x" * 129, "\ud800", "../a"])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(UnknownAdapter) as caught:
        check_adapter(name)
    assert caught.value.hint
    with pytest.raises(ConfigError, match="no name of an adapter"):
        check_adapter_key(name)


def test_no_name_asks_for_no_adapter_and_names_none() -> None:
    check_adapter("")
    with pytest.raises(ConfigError):
        check_adapter_key("")
