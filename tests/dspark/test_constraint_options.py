"""Options of the answer's form, as a message."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from cluster.api import dspark_v1_pb2 as pb
from cluster.constraints import KINDS
from cluster.errors import BadConstraint, ConfigError
from dspark.constraint_options import constraint_of, read_text

SCHEMA = {"type": "object", "properties": {"z": {"const": "é"}, "a": {}}}


def test_the_options_are_those_of_the_protocol() -> None:
    (oneof,) = pb.Constraint.DESCRIPTOR.oneofs
    assert tuple(field.name for field in oneof.fields) == KINDS


@pytest.mark.parametrize("wrap", [dict, OrderedDict, MappingProxyType, json.dumps])
def test_a_schema_is_a_mapping_or_its_text(wrap: Any) -> None:
    constraint = constraint_of({"json_schema": wrap(SCHEMA)})
    assert constraint is not None
    read = json.loads(constraint.json_schema)
    assert list(read["properties"]) == ["z", "a"], "in the order in which it was written"
    assert read == SCHEMA


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"regex": None, "json_object": False, "temperature": 1.0}, None),
        ({"json_object": True}, pb.Constraint(json_object=True)),
        ({"regex": "[a-z]+", "json_object": False}, pb.Constraint(regex="[a-z]+")),
        ({"choice": ("a", "b")}, pb.Constraint(choice=pb.Choices(texts=["a", "b"]))),
        ({"choice": []}, pb.Constraint(choice=pb.Choices())),
        ({"grammar": "root ::= x"}, pb.Constraint(grammar="root ::= x")),
        ({"regex": ""}, pb.Constraint(regex="")),
        ({"json_schema": {}}, pb.Constraint(json_schema="{}")),
    ],
)
def test_one_or_none(options: dict[str, Any], expected: pb.Constraint | None) -> None:
    """What is empty is sent, for the server to refuse: nothing given is ignored."""
    constraint = constraint_of(options)
    assert constraint == expected
    if expected is not None and constraint is not None:
        assert constraint.WhichOneof("kind") == expected.WhichOneof("kind") is not None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"regex": "a", "choice": ["a"]}, "regex and choice"),
        ({"json_object": True, "json_schema": {}}, "json_schema and json_object"),
        ({"choice": "yes"}, "choice 'yes'"),
        ({"choice": {"yes", "no"}}, "choice"),
        ({"choice": ["yes", 1]}, "choice cannot be '1'"),
        ({"json_object": 1}, "json_object '1'"),
        ({"json_object": {}}, "json_object '{}'"),
        ({"json_schema": ["a"]}, "json_schema cannot be"),
        ({"json_schema": {"const": {1}}}, "not JSON serializable"),
        ({"json_schema": {"const": float("nan")}}, "json_schema is no JSON"),
        ({"regex": b"a"}, "regex cannot be"),
        ({"regex": "\ud800"}, "regex is not Unicode"),
        ({"grammar": Path("x")}, "grammar cannot be 'x'"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadConstraint) as caught:
        constraint_of(options)
    assert said in caught.value.message


def test_a_schema_that_holds_itself() -> None:
    schema: dict[str, Any] = {}
    schema["not"] = schema
    with pytest.raises(BadConstraint, match="no JSON"):
        constraint_of({"json_schema": schema})


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text('{"é": 1}', encoding="utf-8")
    assert read_text(path) == '{"é": 1}'
    for data, said in ((b"\xff", "not UTF-8"), (b" \n", "is empty")):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=said):
            read_text(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_text(tmp_path / "none")
