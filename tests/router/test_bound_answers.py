"""Constraints and adapters on their way from a request to the verifier's engine, and its refusals
on the way back, with real routers and verifiers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.errors import BadConstraint, DSparkError, UnknownAdapter, Unsupported
from cluster.wire import Admission, Step
from router.node import RouterNode
from tests.fakes import FakeEngine
from tests.router.harness import (
    MAX_MODEL_LEN,
    Answer,
    Cluster,
    ask,
    cluster,
    eventually,
    expected_ids,
    make_request,
)
from verifier_service.engine import StepOutcome

PROMPT = (39, 4, 66)
TEXT = expected_ids(PROMPT, 200)
ASKED = {"constraint_kind": "choice", "constraint": '["né", "no"]', "adapter": "sql"}
PLAIN: dict[str, Any] = {"constraint_kinds": (), "adapters": ()}


class Engine(FakeEngine):
    """Takes every kind and two adapters; remembers what it admitted; refuses what it is told to."""

    def __init__(self, *, refusal: DSparkError | None = None, **options: Any) -> None:
        values: dict[str, Any] = {
            "max_model_len": MAX_MODEL_LEN,
            "constraint_kinds": ("json_schema", "choice"),
            "adapters": ("chat", "sql"),
        }
        super().__init__(**(values | options))
        self.admitted: list[Admission] = []
        self._refusal = refusal

    def check(self, admission: Admission) -> None:
        super().check(admission)
        if self._refusal is not None and admission.constraint_kind:
            raise self._refusal

    def step(self, step: Step) -> StepOutcome:
        self.admitted += step.admissions
        return super().step(step)


def told(admission: Admission) -> dict[str, str]:
    return {name: getattr(admission, name) for name in ASKED}


async def owner_and_other(c: Cluster, engine: Engine) -> tuple[RouterNode, RouterNode]:
    """Two routers over one verifier: its owner, and the one that must lend."""
    await c.add_verifier(engine=engine)
    owner = await c.add_router("router-0")
    await c.ready(owner)
    other = await c.add_router("router-1")
    await eventually(
        lambda: any(peer.details["free_slots"] > 0 for peer in other._service.line.peers.values()),
        "the second router does not see the first one's lane",
    )
    return owner, other


async def test_the_engine_is_told_and_other_requests_are_not_bound() -> None:
    async with cluster() as c:
        engine = Engine()
        await c.add_verifier(engine=engine)
        await c.add_drafter()
        router = await c.add_router()
        await c.ready(router, drafters=1)
        bound = await ask(router, make_request(PROMPT, 20, **ASKED))
        free = await ask(router, make_request((*PROMPT, 1), 20))
        assert bound.ids == TEXT[:20]
        assert bound.usage.num_accepted > 0, "it is drafted for like any other"
        assert free.ids == expected_ids((*PROMPT, 1), 20)
    assert [told(admission) for admission in engine.admitted] == [
        ASKED,
        dict.fromkeys(ASKED, ""),
    ]


async def test_a_request_goes_on_bound_when_its_verifier_has_died() -> None:
    async with cluster() as c:
        first, second = Engine(delay_s=lambda _: 0.005), Engine()
        await c.add_verifier("verifier-0", engine=first)
        router = await c.add_router()
        await c.ready(router)
        answer = Answer()
        asking = asyncio.create_task(ask(router, make_request(PROMPT, 60, **ASKED), answer))
        await eventually(lambda: len(answer.deltas) > 2, "never started")
        await c.kill_verifier("verifier-0")
        await c.add_verifier("verifier-1", engine=second)
        await asking
        assert answer.ids == TEXT[:60]
    (begun,), (continued,) = first.admitted, second.admitted
    assert told(begun) == told(continued) == ASKED
    assert continued.num_prompt == begun.num_prompt == len(begun.ids) == len(PROMPT)
    emitted = continued.ids[continued.num_prompt :].tolist()
    assert emitted == TEXT[: len(emitted)] != [], "the engine can tell how far the answer is"


async def test_a_lent_request_stays_bound_and_so_does_its_refusal() -> None:
    async with cluster() as c:
        engine = Engine()
        _, other = await owner_and_other(c, engine)
        assert (await ask(other, make_request(PROMPT, 20, **ASKED))).ids == TEXT[:20]
        assert other.metrics()["num_forwarded"] == 1
        with pytest.raises(UnknownAdapter, match="no adapter 'poetry'"):
            await ask(other, make_request(PROMPT, 20, adapter="poetry"))
        assert other.metrics()["num_forwarded"] == 2
    assert [told(admission) for admission in engine.admitted] == [ASKED]


async def test_a_lent_request_comes_back_bound_when_its_owner_leaves() -> None:
    async with cluster() as c:
        engine = Engine(delay_s=lambda _: 0.005)
        owner, other = await owner_and_other(c, engine)
        answer = Answer()
        asking = asyncio.create_task(ask(other, make_request(PROMPT, 120, **ASKED), answer))
        await eventually(lambda: len(answer.deltas) > 2, "never started")
        c.routers.remove(owner)
        await owner.stop()
        await asking
        assert answer.ids == TEXT[:120]
        assert other.metrics()["lanes"] == 1
    begun, continued = engine.admitted
    assert told(begun) == told(continued) == ASKED
    assert len(continued.ids) > len(begun.ids)


@pytest.mark.parametrize(
    ("options", "asked", "kind", "said"),
    [
        (
            PLAIN,
            {"constraint_kind": "json_object"},
            Unsupported,
            "constraint json_object: this verifier's engine cannot hold an answer to it "
            "(verifier.engine: vllm can)",
        ),
        (
            {},
            {"constraint_kind": "regex", "constraint": "a+"},
            Unsupported,
            "(it takes json_schema, choice)",
        ),
        (
            PLAIN,
            {"adapter": "sql"},
            Unsupported,
            "(name it in verifier.adapters, with verifier.engine: vllm)",
        ),
        ({}, {"adapter": "poetry"}, UnknownAdapter, "no adapter 'poetry' (one of chat, sql)"),
        (
            {"refusal": BadConstraint("line 1: no rule 'é'", hint="define it")},
            {"constraint_kind": "json_schema", "constraint": "{}"},
            BadConstraint,
            "line 1: no rule 'é' (define it)",
        ),
        (
            {"refusal": BadConstraint("é" * 10_000)},
            {"constraint_kind": "json_schema", "constraint": "{}"},
            BadConstraint,
            "é" * 4096,
        ),
    ],
)
async def test_what_the_engine_refuses_ends_the_request_with_its_error(
    options: dict[str, Any], asked: dict[str, str], kind: type[DSparkError], said: str
) -> None:
    async with cluster() as c:
        await c.add_verifier(engine=Engine(**options))
        router = await c.add_router()
        await c.ready(router)
        refused, served = await asyncio.gather(
            ask(router, make_request(PROMPT, **asked)),
            ask(router, make_request((*PROMPT, 1), 12)),
            return_exceptions=True,
        )
        assert type(refused) is kind
        assert said in str(refused)
        assert isinstance(served, Answer)
        assert served.ids == expected_ids((*PROMPT, 1), 12), "its neighbours do not notice"
        again = await ask(router, make_request(PROMPT, 12))
        assert again.ids == TEXT[:12]


async def test_what_no_engine_could_honour_is_refused_before_any_verifier() -> None:
    async with cluster() as c:
        router = await c.add_router()  # without a verifier it would wait
        for asked in (
            {"constraint_kind": "json_schema", "constraint": "["},
            {"constraint_kind": "choice", "constraint": "[]"},
            {"constraint_kind": "yaml", "constraint": "a"},
            {"constraint_kind": "json_object", "ignore_eos": True},
        ):
            with pytest.raises(BadConstraint) as caught:
                await ask(router, make_request(PROMPT, **asked))
            assert caught.value.hint
        with pytest.raises(UnknownAdapter, match="no name of an adapter"):
            await ask(router, make_request(PROMPT, adapter="a b"))
