"""Values of the wrong type: the message says what came, the hint how to write what was meant."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from cluster.config import Config, load_config
from cluster.errors import ConfigError
from cluster.sections import natural, one_of, parse_section, positive
from cluster.yaml_text import parse_yaml


def short(name: str) -> None:
    if len(name) > 3:
        raise ConfigError("too long a name", hint="3 characters")


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str = "x"


@dataclass(frozen=True, kw_only=True)
class Section:
    count: int = natural(1, most=1 << 40)
    seconds: float = positive(1.0)
    share: float = field(default=0.5, metadata={"least": 0, "most": 1.0})
    word: str = one_of("a", "b", "")
    flag: bool = True
    sizes: tuple[int, ...] = ()
    part: Part = field(default_factory=Part)
    prices: Mapping[str, float] = field(
        default_factory=dict, metadata={"least": 0, "read_key": short}
    )
    parts: Mapping[str, Part] = field(default_factory=dict)


def refused(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_section(Section, parse_yaml(text, "text"), "")
    return caught.value


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("seconds: 1e9", "seconds: expected a number, got the text '1e9'", "write 1000000000.0"),
        ("seconds: 1e-3", "seconds: expected a number, got the text '1e-3'", "write 0.001"),
        ("seconds: 1e-7", "seconds: expected a number", "write 1.0e-07"),
        ("seconds: '2.5'", "seconds: expected a number, got the text '2.5'", "write 2.5"),
        ("count: 1e3", "count: expected a whole number, got the text '1e3'", "write 1000"),
        ("count: 1.0e+3", "count: expected a whole number, got 1000.0", "write 1000"),
        ("count: '8'", "count: expected a whole number, got the text '8'", "write 8"),
        ("count: 1.5", "count: expected a whole number, got 1.5", ""),
        ("count: many", "count: expected a whole number, got the text 'many'", ""),
        ("count:", "count: expected a whole number, got nothing", ""),
        ("count: yes", "count: expected a whole number, got true", ""),
        ("count: {a: 1}", "count: expected a whole number, got a mapping", ""),
        ("count: 2024-01-31", "count: expected a whole number, got 2024-01-31", ""),
        ("count: 999999999999999999999", "count: 2^69 or more must be at most", ""),
        ("seconds: .nan", "seconds: nan is not a finite number", "over 0"),
        ("share: .inf", "share: inf is not a finite number", "at least 0, at most 1.0"),
        ("share: " + "9" * 400, "share: 4.6", ""),
        ("sizes: [1, 1e3]", "sizes[1]: expected a whole number", "write 1000"),
        ("sizes: 3", "sizes: expected a list, got 3", "[A, B, ...]"),
        ("word: c", "word: 'c' is not one of a, b, ''", ""),
        ("word: 5", "word: expected text, got 5", "quotes"),
        ("word: off", "word: expected text, got false", "quotes"),
        (
            "flag: 'true'",
            "flag: expected true or false, got the text 'true'",
            "true, without quotes",
        ),
        ("flag: 1", "flag: expected true or false, got 1", ""),
        ("part:", "part: expected a mapping, got nothing", "KEY: VALUE"),
        ("part: [name]", "part: expected a mapping, got a list", ""),
        ("prices: [1]", "prices: expected a mapping, got a list", "NAME: VALUE"),
        ("prices:", "prices: expected a mapping, got nothing", "NAME: VALUE"),
        ("prices: {a: 1e3}", "prices.a: expected a number, got the text '1e3'", "write 1000.0"),
        ("prices: {a: -1}", "prices.a: -1.0 must be at least 0", ""),
        ("prices: {3: 1}", "prices, a key: expected text, got 3", "quotes"),
        ("prices: {long: 1}", "prices, a key: too long a name", "3 characters"),
        ("parts: {a: {nome: x}}", "parts.a.nome: unknown key", "name"),
        ("[1]", "config: expected a mapping, got a list", "KEY: VALUE"),
    ],
)
def test_messages(text: str, message: str, hint: str) -> None:
    error = refused(text)
    assert error.message.startswith(message)
    assert hint in error.hint
    assert bool(hint) == bool(error.hint)


def test_mappings_are_read() -> None:
    read = parse_section(Section, {"prices": {"a": 1, "b": 2.5}, "parts": {"c": {"name": "y"}}}, "")
    assert read.prices == {"a": 1.0, "b": 2.5}
    assert read.parts == {"c": Part(name="y")}
    assert Section().prices == {}


@pytest.mark.parametrize("text", ["1e9", "1E9", "1e-3", "2.5e10", "1e-7", "7e22"])
def test_what_is_written_as_the_hint_says_is_read(text: str) -> None:
    if float(text) < 1 << 62:
        hint = refused(f"seconds: {text}").hint
        assert "YAML 1.1" in hint
        written = hint.rpartition("write ")[2]
        read = parse_section(Section, parse_yaml(f"seconds: {written}", ""), "")
        assert read.seconds == float(text)
    else:
        assert "number" in refused(f"seconds: {text}").message


def number_fields(cls: type[Any], path: str) -> Iterator[tuple[str, type[Any]]]:
    """Every field of the configuration that holds a number."""
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        kind, where = hints[item.name], f"{path}{item.name}"
        if dataclasses.is_dataclass(kind):
            yield from number_fields(typing.cast("type[Any]", kind), f"{where}.")
        elif kind in (int, float):
            yield where, kind


NUMBERS = dict(number_fields(Config, ""))


@pytest.mark.parametrize("path", NUMBERS)
def test_every_number_of_the_configuration_says_so(path: str) -> None:
    tree: Any = "1e3"
    for name in reversed(path.split(".")):
        tree = {name: tree}
    with pytest.raises(ConfigError) as caught:
        load_config(tree)
    assert caught.value.message.startswith(f"{path}: expected a")
    assert caught.value.hint.endswith("write 1000" if NUMBERS[path] is int else "write 1000.0")
