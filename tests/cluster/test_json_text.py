"""JSON of strangers: every way to be wrong is an error in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.errors import ConfigError
from cluster.json_text import misshape, parse_json, read_json


def test_values() -> None:
    assert parse_json('{"a": [1, null]}') == {"a": [1, None]}
    assert parse_json(b"\xef\xbb\xbf[1]") == [1]


@pytest.mark.parametrize("text", ["", "{", b"\xff\xfe\xff", "[" * 100_000, '{"a":' * 100_000])
def test_mistakes(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)


def test_strict_json_has_no_numbers_that_are_none() -> None:
    assert parse_json("[NaN, Infinity]") != []
    for text in ("NaN", "[Infinity]", '{"a": -Infinity}'):
        with pytest.raises(ValueError, match="JSON has no"):
            parse_json(text, strict=True)
    assert parse_json('[1.5, "NaN"]', strict=True) == [1.5, "NaN"]


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[1]")
    assert read_json(path, "") == [1]
    for data, said in ((b"\xff", "not UTF-8"), (b"hi", "line 1 column 1"), (b"", "line 1")):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=r"a\.json is not JSON") as caught:
            read_json(path, "make one")
        assert said in caught.value.message
        assert caught.value.hint == "make one"
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        read_json(tmp_path, "")


def test_what_a_value_lacks_is_said_in_words() -> None:
    value: Any = {"a": []}
    for take, said in (
        (lambda: value["b"], "'b' is missing"),
        (lambda: value["a"][0], "a list is too short"),
        (lambda: value["a"]["c"], "a value is of the wrong type"),
        (lambda: int("x"), "invalid literal"),
    ):
        with pytest.raises((KeyError, IndexError, TypeError, ValueError)) as caught:
            take()
        assert said in misshape(caught.value)
