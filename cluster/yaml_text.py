"""YAML that anyone may have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

from cluster.errors import ConfigError

_MAX_SHOWN: Final = 300
"""Characters of a reason."""


_MERGE: Final = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """Refuses a key that comes twice in one mapping: the first value would be lost in silence."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            if key.value in seen:
                raise yaml.composer.ComposerError(
                    None, None, f"the key {key.value[:64]!r} comes twice", key.start_mark
                )
            seen.add(key.value)
        return node


def read_yaml(path: Path) -> Any:
    """What a file holds; None if that is nothing.

    Raises:
        ConfigError: it cannot be read, or is not YAML.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", hint="name a YAML file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not YAML: not UTF-8 at byte {error.start}") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> Any:
    """What a text stands for.

    Args:
        name: of the text, for messages.

    Raises:
        ConfigError: it is not YAML.
    """
    try:
        # Safe: a SafeLoader makes plain data only.
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # ValueError: a date that is none, a number of too many digits.
        raise ConfigError(f"{name} is not YAML: {_reason(error)}") from error


def yaml_float(number: float) -> str:
    """A float as YAML 1.1 reads it: a mantissa with a point, an exponent with a sign."""
    mantissa, exponent, power = repr(float(number)).partition("e")
    if "." not in mantissa and number - number == 0:  # finite
        mantissa += ".0"
    words = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}
    return words.get(mantissa, f"{mantissa}{exponent}{power}")


def _reason(error: Exception) -> str:
    """In one line, with the place."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"[:_MAX_SHOWN]
    return " ".join(str(error).split())[:_MAX_SHOWN]
