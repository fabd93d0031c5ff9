"""The options of `generate` that bind the form of an answer, as a `dspark.v1` constraint."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from cluster.api import dspark_v1_pb2 as pb
from cluster.constraints import KINDS
from cluster.errors import BadConstraint, ConfigError


def constraint_of(options: Mapping[str, Any]) -> pb.Constraint | None:
    """The constraint among the options, None if there is none (or only ``json_object=False``).

    Whether the server can honour it, the server says.

    Raises:
        BadConstraint: more than one, or a value of the wrong type.
    """
    given = {kind: options[kind] for kind in KINDS if options.get(kind) is not None}
    if given.get("json_object") is False:
        del given["json_object"]
    if len(given) > 1:
        raise BadConstraint(
            f"{' and '.join(given)}: an answer has one form", hint="give at most one of them"
        )
    for kind, value in given.items():
        return _READ[kind](value)
    return None


def read_text(path: Path) -> str:
    """A schema or grammar in a file.

    Raises:
        ConfigError: it cannot be read, is not UTF-8, or is empty.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text") from error
    if not text.strip():
        raise ConfigError(f"{path} is empty")
    return text


def _json_schema(value: object) -> pb.Constraint:
    if isinstance(value, Mapping):
        try:
            value = json.dumps(dict(value), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadConstraint(f"json_schema is no JSON: {error}") from error
    return pb.Constraint(json_schema=_text("json_schema", value, hint="a mapping or its JSON text"))


def _json_object(value: object) -> pb.Constraint:
    if value is not True:
        raise BadConstraint(f"json_object {str(value)[:64]!r}", hint="True, or json_schema={...}")
    return pb.Constraint(json_object=True)


def _regex(value: object) -> pb.Constraint:
    return pb.Constraint(regex=_text("regex", value, hint="the pattern as a text"))


def _choice(value: object) -> pb.Constraint:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise BadConstraint(f"choice {str(value)[:64]!r}", hint='a list, as in ["yes", "no"]')
    texts = [_text("choice", one, hint="a list of texts") for one in value]
    return pb.Constraint(choice=pb.Choices(texts=texts))


def _grammar(value: object) -> pb.Constraint:
    return pb.Constraint(grammar=_text("grammar", value, hint="EBNF as a text"))


def _text(kind: str, value: object, *, hint: str) -> str:
    if not isinstance(value, str):
        raise BadConstraint(f"{kind} cannot be {str(value)[:64]!r}", hint=hint)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadConstraint(f"{kind} is not Unicode text: {error.reason}") from error
    return value


_READ: Final[dict[str, Callable[[object], pb.Constraint]]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
