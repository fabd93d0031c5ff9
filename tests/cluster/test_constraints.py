"""Constraints that say something, and all those that do not."""

from __future__ import annotations

import json

import pytest

from cluster.constraints import (
    KINDS,
    MAX_CHOICES,
    MAX_CONSTRAINT_BYTES,
    MAX_NESTING,
    check_constraint,
    choice_text,
    read_choices,
)
from cluster.errors import BadConstraint

FULL = MAX_CONSTRAINT_BYTES


def nested(levels: int) -> str:
    """A schema with so many levels below its outermost object."""
    return '{"not":' * levels + "{}" + "}" * levels


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("", ""),
        ("json_object", ""),
        ("json_schema", "{}"),
        ("json_schema", '{"type": "object", "properties": {"é": {"type": "string"}}}'),
        ("json_schema", nested(MAX_NESTING - 1)),
        ("regex", " "),
        ("regex", r"\p{L}(?<x>[0-9)"),  # no pattern of Python's: engines have their own dialects
        ("regex", "a" * FULL),
        ("regex", "é" * (FULL // 2)),
        ("choice", '["yes", "no"]'),
        ("choice", choice_text([str(i) for i in range(MAX_CHOICES)])),
        ("grammar", 'root ::= "a"'),
    ],
    ids=lambda value: str(value)[:24],
)
def test_these_go_to_the_engine(kind: str, text: str) -> None:
    check_constraint(kind, text)


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("", "x", "without a kind"),
        ("yaml", "x", "'yaml' is unknown"),
        ("x" * 1000, "", "is unknown"),
        ("json_object", "{}", "takes no text"),
        ("json_schema", "", "not JSON"),
        ("json_schema", "{", "not JSON"),
        ("json_schema", '{"const": NaN}', "JSON has no NaN"),
        ("json_schema", '{"const": -Infinity}', "JSON has no -Infinity"),
        ("json_schema", "[1]", "no JSON object"),
        ("json_schema", "true", "no JSON object"),
        ("json_schema", nested(MAX_NESTING), "nested too deeply"),
        ("json_schema", nested(5000), "nested too deeply"),
        ("json_schema", '{"enum": ' + "[" * 10_000, "nested too deeply"),
        ("regex", "", "regex is empty"),
        ("regex", "a" * (FULL + 1), f"regex of {FULL + 1} characters"),
        ("regex", "é" * (FULL // 2 + 1), f"regex of {FULL // 2 + 1} characters"),
        ("regex", "a\ud800", "not Unicode"),
        ("choice", "yes", "not JSON"),
        ("choice", '{"yes": 1}', "no list of texts"),
        ("choice", '["yes", 1]', "no list of texts"),
        ("choice", "[]", "choice of 0 texts"),
        ("choice", choice_text([str(i) for i in range(MAX_CHOICES + 1)]), "choice of 1025 texts"),
        ("choice", '["yes", ""]', "an empty text"),
        ("choice", '["yes", "no", "yes"]', "'yes' twice"),
        ("choice", r'["\ud800"]', "not Unicode"),
        ("grammar", "", "grammar is empty"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_these_are_refused_in_words(kind: str, text: str, said: str) -> None:
    with pytest.raises(BadConstraint) as caught:
        check_constraint(kind, text)
    assert said in caught.value.message
    assert caught.value.hint
    assert len(str(caught.value)) < 300, "an error is no place for the whole text"


def test_every_kind_is_told_from_the_others() -> None:
    """A text that one kind takes and the next does not."""
    takers = {
        text: {kind for kind in KINDS if takes(kind, text)}
        for text in ("", "{}", '["a"]', "root ::= x")
    }
    free = {"regex", "grammar"}
    assert takers == {
        "": {"json_object"},
        "{}": {"json_schema", *free},
        '["a"]': {"choice", *free},
        "root ::= x": free,
    }


def takes(kind: str, text: str) -> bool:
    try:
        check_constraint(kind, text)
    except BadConstraint:
        return False
    return True


def test_choices_come_back_as_they_went() -> None:
    choices = ("yes", ' "no" ', "né\n", "[1]")
    text = choice_text(choices)
    assert read_choices(text) == choices
    assert json.loads(text) == list(choices)
