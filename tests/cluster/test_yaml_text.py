"""YAML as people write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.errors import ConfigError
from cluster.yaml_text import parse_yaml, read_yaml

MERGED = """
base: &base {a: 1, b: 2}
other: {<<: *base, b: 3}
third: {<<: [*base, {c: 4}], a: 5}
"""


def test_plain_data() -> None:
    assert parse_yaml("{a: [1, 2.5, yes, text, null]}", "x") == {"a": [1, 2.5, True, "text", None]}
    assert parse_yaml("", "x") is None
    merged = parse_yaml(MERGED, "x")
    assert merged["other"] == {"a": 1, "b": 3}
    assert merged["third"] == {"a": 5, "b": 2, "c": 4}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "line 1, column 5: "),
        ("a: 1\nb: {c: 1, c: 2}", "line 2, column 11: the key 'c' comes twice"),
        ("a: 1\nb: 2\na: 3", "line 3, column 1: the key 'a' comes twice"),
        ("a: 2024-13-45", "month must be in"),
        ("a: " + "9" * 5000, "4300 digits"),
        ("[" * 10_000, "nested too deeply"),
        ("!!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("{[1]: 2}", "unhashable key"),
    ],
)
def test_what_is_none(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"file\.yaml is not YAML") as caught:
        parse_yaml(text, "file.yaml")
    assert said in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.yaml: No such file"):
        read_yaml(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        read_yaml(tmp_path)
    (tmp_path / "bad.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 3"):
        read_yaml(tmp_path / "bad.yaml")
