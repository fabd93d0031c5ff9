"""Constraints on the form of an answer, as far as they can be judged without an engine.

A constraint is a kind and one text, and goes like that from ingress to engine:

    json_schema   the schema, a JSON object
    json_object   no text: any JSON object
    regex         the pattern that the whole answer has to match
    choice        a JSON list of texts, of which the answer is one
    grammar       EBNF

What regular expressions, schemas and grammars may hold differs between engines: each checks the
rest for itself when it compiles them. No kind and no text: any answer.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Final

from cluster.errors import BadConstraint
from cluster.json_text import parse_json

KINDS: Final = ("json_schema", "json_object", "regex", "choice", "grammar")
MAX_CONSTRAINT_BYTES: Final = 64 << 10
"""Of a constraint's text, in UTF-8."""
MAX_CHOICES: Final = 1024
MAX_NESTING: Final = 128
"""Lists and objects inside each other in a schema: engines walk it by recursion."""
_ONE_OF: Final = f"one of {', '.join(KINDS)}"


def check_constraint(kind: str, text: str) -> None:
    """Refuse a constraint that no engine could honour.

    What passes also fits a frame: a request that could not be sent would take the step of all
    others down with it.

    Raises:
        BadConstraint: names the kind and says what is wrong with the text.
    """
    if not kind:
        if text:
            raise BadConstraint("a constraint without a kind", hint=_ONE_OF)
        return
    if kind not in KINDS:
        raise BadConstraint(f"constraint {kind[:64]!r} is unknown", hint=_ONE_OF)
    _check_text(kind, text)
    if kind == "json_object":
        if text:
            raise BadConstraint("json_object takes no text", hint="json_schema takes a schema")
    elif kind == "json_schema":
        _check_schema(text)
    elif kind == "choice":
        read_choices(text)
    elif not text:
        raise BadConstraint(f"{kind} is empty", hint="leave it out for any answer")


def choice_text(choices: Sequence[str]) -> str:
    """The text of a ``choice`` constraint; `read_choices` reads and checks it."""
    return json.dumps(list(choices), ensure_ascii=False)


def read_choices(text: str) -> tuple[str, ...]:
    """The answers that a ``choice`` constraint allows.

    Raises:
        BadConstraint: not a JSON list of texts; none, too many, an empty one or one twice.
    """
    choices = _parsed("choice", text)
    if not isinstance(choices, list) or not all(isinstance(one, str) for one in choices):
        raise BadConstraint("choice is no list of texts", hint='as in ["yes", "no"]')
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise BadConstraint(f"choice of {len(choices)} texts", hint=f"1 to {MAX_CHOICES}")
    if "" in choices:
        raise BadConstraint("choice holds an empty text", hint="each has at least one character")
    for one in choices:
        _encoded("choice", one)
    if repeated := _repeated(choices):
        raise BadConstraint(f"choice holds {repeated[:64]!r} twice", hint="each text once")
    return tuple(choices)


def _check_text(kind: str, text: str) -> None:
    # Characters first: a text that is far too long need not be encoded to be refused.
    if len(text) > MAX_CONSTRAINT_BYTES or len(_encoded(kind, text)) > MAX_CONSTRAINT_BYTES:
        raise BadConstraint(
            f"{kind} of {len(text)} characters", hint=f"at most {MAX_CONSTRAINT_BYTES} bytes"
        )


def _encoded(kind: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise BadConstraint(
            f"{kind} is not Unicode text: {error.reason}",
            hint="half of a surrogate pair is no character",
        ) from error


def _check_schema(text: str) -> None:
    schema = _parsed("json_schema", text)
    if not isinstance(schema, dict):
        raise BadConstraint("json_schema is no JSON object", hint='as in {"type": "object"}')
    level: list[object] = [schema]
    for _ in range(MAX_NESTING):
        level = [inner for outer in level for inner in _inside(outer)]
    if level:
        raise BadConstraint(
            "json_schema is nested too deeply", hint=f"at most {MAX_NESTING} levels; use $defs"
        )


def _inside(value: object) -> Collection[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _parsed(kind: str, text: str) -> object:
    try:
        return parse_json(text, strict=True)
    except ValueError as error:
        raise BadConstraint(
            f"{kind} is not JSON: {error}", hint="check it with a JSON parser"
        ) from error


def _repeated(choices: Sequence[str]) -> str:
    """The first text that comes a second time; empty if all differ."""
    seen: set[str] = set()
    for one in choices:
        if one in seen:
            return one
        seen.add(one)
    return ""
