"""`SchedulingConfig` as texts by name and back: how it travels when it is changed while serving."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from cluster.config import SchedulingConfig
from cluster.errors import ConfigError
from cluster.sections import parse_section

_WORDS: Final = {"true": True, "false": False}


def scheduling_text(scheduling: SchedulingConfig) -> dict[str, str]:
    """All values by name; `with_values` reads them back exactly."""
    values = {
        field.name: getattr(scheduling, field.name) for field in dataclasses.fields(scheduling)
    }
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in values.items()
    }


def with_values(scheduling: SchedulingConfig, values: Mapping[str, str]) -> SchedulingConfig:
    """The scheduling with these values changed, checked as in a configuration file.

    Raises:
        ConfigError: an unknown name, or a value out of its domain; names it.
    """
    given = {
        field.name: getattr(scheduling, field.name) for field in dataclasses.fields(scheduling)
    }
    for name, text in values.items():
        given[name] = _value(name, text, type(given.get(name, "")))
    return parse_section(SchedulingConfig, given, "router.scheduling")


def _value(name: str, text: str, kind: type[Any]) -> str | float | bool:
    """What a text means to a field of this type; left as it is where it means nothing."""
    if kind is bool:
        if text not in _WORDS:
            raise ConfigError(f"router.scheduling.{name}: {text!r} is not one of true, false")
        return _WORDS[text]
    if kind is float:
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"router.scheduling.{name}: {text!r} is not a number") from None
    return text
