"""What every engine refuses by its limits alone."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.constraints import KINDS
from cluster.errors import BadConstraint, DSparkError, UnknownAdapter, Unsupported
from tests.frames import make_admission
from verifier_service.engine import EngineLimits
from verifier_service.live_request import check_admission

TEXTS = {
    "json_schema": '{"type": "object"}',
    "json_object": "",
    "regex": "a+",
    "choice": '["a", "b"]',
    "grammar": 'root ::= "a"',
}


def limits(**changes: Any) -> EngineLimits:
    values: dict[str, Any] = {
        "model_fingerprint": "m",
        "vocab_size": 10,
        "max_model_len": 64,
        "max_requests": 4,
        "max_step_tokens": 16,
        "kv_block_tokens": 8,
        "kv_blocks": 16,
    }
    return EngineLimits(**(values | changes))


def check(offered: EngineLimits, **changes: Any) -> None:
    check_admission(make_admission(1, [1, 2], **changes), offered)


def refused(offered: EngineLimits, kind: type[DSparkError], **changes: Any) -> str:
    with pytest.raises(kind) as caught:
        check(offered, **changes)
    assert type(caught.value) is kind
    assert caught.value.hint
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_taken_where_it_is_offered_and_nowhere_else(kind: str) -> None:
    text = TEXTS[kind]
    others = tuple(other for other in KINDS if other != kind)
    check(limits(constraint_kinds=(kind,)), constraint_kind=kind, constraint=text)
    for offered, hint in (((), "verifier.engine: vllm"), (others, ", ".join(others))):
        said = refused(
            limits(constraint_kinds=offered), Unsupported, constraint_kind=kind, constraint=text
        )
        assert f"constraint {kind}" in said
        assert hint in said
    check(limits())


@pytest.mark.parametrize("offered", [(), KINDS])
@pytest.mark.parametrize(("kind", "text"), [("choice", "[]"), ("yaml", "x"), ("", "x")])
def test_a_constraint_that_says_nothing_is_bad_everywhere(
    offered: tuple[str, ...], kind: str, text: str
) -> None:
    engine = limits(constraint_kinds=offered)
    refused(engine, BadConstraint, constraint_kind=kind, constraint=text)


def test_adapters() -> None:
    two = limits(adapters=("chat", "sql"))
    check(two, adapter="sql")
    check(two)
    assert "one of chat, sql" in refused(two, UnknownAdapter, adapter="SQL")
    assert "verifier.adapters" in refused(limits(), Unsupported, adapter="sql")
    many = limits(adapters=tuple(f"adapter-{i}" for i in range(1000)))
    assert len(refused(many, UnknownAdapter, adapter="x" * 128)) < 700
