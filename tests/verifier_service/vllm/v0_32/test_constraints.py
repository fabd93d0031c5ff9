"""Constrained answers: every one has its form, whatever is drafted, and the form of the rest when
it is continued."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import jsonschema
import numpy as np
import pytest

from cluster.constraints import choice_text
from cluster.errors import BadConstraint
from cluster.sparse import SparseQ
from cluster.wire import FINISH_STOP, Admission
from tests.frames import Row, make_admission, make_sampling, make_step
from tests.verifier_service.conformance.drafts import another
from tests.verifier_service.conformance.rounds import Draft, Rounds
from tests.verifier_service.conformance.targets import Target
from tests.verifier_service.torch_targets import VOCAB_SIZE, prompt, reference_logits
from tests.verifier_service.vllm.characters import END, TEXTS, decode, encode
from verifier_service.engine import Engine

_MAX_IDLE_STEPS: Final = 20
SCHEMA: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "rank": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["new", "old"]},
    },
    "required": ["name", "rank", "kind"],
    "additionalProperties": False,
}
CHOICES: Final = ("yes", "no", "not sure", "never", "yesterday")
GRAMMAR: Final = 'root ::= term ("+" term){1,3}\nterm ::= [0-9]{1,2} | "(" term ")"'
FORMS: Final = {
    "json_schema": json.dumps(SCHEMA),
    "json_object": "",
    "regex": r"[ab]{2,4}-(x|yz)\d{3}",
    "choice": choice_text(CHOICES),
    "grammar": GRAMMAR,
}
SAMPLINGS: Final = {
    "greedy": make_sampling(),
    "coupled": make_sampling(temperature=1.0, seed=11),
    "rejection": make_sampling(temperature=1.0, mode="rejection", seed=12),
}

# xgrammar, of an argument that vLLM gives it.
pytestmark = pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")


@pytest.fixture(autouse=True)
def complaints(vllm: None, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """vLLM tells its log of drafts and tokens that a grammar refuses: none comes so far. A test
    that expects one clears it."""
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    yield
    logger.removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records] == []


def has_form(kind: str, text: str) -> bool:
    """Is the text, judged without the engine, an answer to `FORMS`?"""
    if kind == "json_schema":
        jsonschema.validate(json.loads(text), SCHEMA)
        return True
    if kind == "json_object":
        return isinstance(json.loads(text), dict)
    if kind == "regex":
        return re.fullmatch(FORMS[kind], text) is not None
    if kind == "choice":
        return text in CHOICES
    term = r"\(*[0-9]{1,2}\)*"
    balanced = all(part.count("(") == part.count(")") for part in text.split("+"))
    return re.fullmatch(rf"{term}(\+{term}){{1,3}}", text) is not None and balanced


def constrained(rid: int, kind: str, ids: Sequence[int], **changes: Any) -> Admission:
    """A request for an answer of a form, which a bias keeps short where the form does not."""
    closing = [TEXTS.index(text) for text in ('"', "}", '"}', ")", "{}")]
    sampling = changes.pop("sampling", SAMPLINGS["greedy"])
    bias = {
        "bias_ids": np.array(closing, np.int32),
        "bias_values": np.full(len(closing), 6.0, np.float32),
    }
    fields = {"max_new_tokens": 60, "stop_ids": np.array([END], np.int32), **changes}
    return make_admission(
        rid,
        ids,
        sampling=make_sampling(
            temperature=sampling.temperature, mode=sampling.mode, seed=sampling.seed + rid, **bias
        ),
        constraint_kind=kind,
        constraint=FORMS[kind],
        **fields,
    )


def garbage(rid: int, ids: Sequence[int]) -> Draft:
    """Any six tokens."""
    rng = np.random.default_rng([rid, len(ids)])
    return Draft(ids=rng.integers(0, VOCAB_SIZE, 6).tolist()[: 95 - len(ids)])


# --- forms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", SAMPLINGS)
@pytest.mark.parametrize("kind", FORMS)
def test_every_answer_has_its_form(engine: Engine, kind: str, mode: str) -> None:
    """Eight of a form in one batch with eight unconstrained, under drafts of no worth."""
    rounds = Rounds(engine)
    free = [make_admission(100 + rid, prompt(9, rid), max_new_tokens=20) for rid in range(8)]
    asked = [
        constrained(rid, kind, prompt(9 + rid, rid), sampling=SAMPLINGS[mode]) for rid in range(8)
    ]
    rounds.run([*asked, *free], garbage)
    assert not rounds.refused
    for rid in range(8):
        assert rounds.finish[rid] == FINISH_STOP, decode(rounds.emitted(rid))
        assert rounds.emitted(rid)[-1] == END
        assert has_form(kind, decode(rounds.emitted(rid))), decode(rounds.emitted(rid))


def test_a_choice_is_the_likeliest_at_every_token(engine: Engine, tiny: Target) -> None:
    """The argmax over the tokens that lead to a choice, by transformers and by hand."""
    for seed in range(6):
        ids = prompt(9, 60 + seed)
        text: list[int] = []
        while text[-1:] != [END]:
            said = decode(text)
            leads = [
                token
                for token in range(VOCAB_SIZE)
                if (said in CHOICES if token == END else _leads(said + TEXTS[token]))
            ]
            law = reference_logits(tiny.reference.model, [*ids, *text])[-1]
            text.append(max(leads, key=lambda token: float(law[token])))
        rounds = Rounds(engine)
        stop = np.array([END], np.int32)
        rounds.run(
            [
                make_admission(
                    0,
                    ids,
                    max_new_tokens=20,
                    stop_ids=stop,
                    constraint_kind="choice",
                    constraint=FORMS["choice"],
                )
            ],
            garbage,
        )
        assert rounds.emitted(0) == text


def _leads(text: str) -> bool:
    return any(choice.startswith(text) for choice in CHOICES)


def test_two_stop_tokens(engine: Engine) -> None:
    """Either ends it, and only where the form allows an end."""
    ends = [END, TEXTS.index("~")]
    seen = set()
    for seed in range(12):
        rounds = Rounds(engine)
        request = constrained(
            seed,
            "regex",
            prompt(9, seed),
            sampling=SAMPLINGS["coupled"],
            stop_ids=np.array(ends, np.int32),
        )
        rounds.run([request])
        *text, end = rounds.emitted(seed)
        assert has_form("regex", decode(text))
        seen.add(end)
    assert seen == set(ends)


# --- drafts --------------------------------------------------------------------------------------


def answer(engine: Engine, mode: str, kind: str = "json_schema") -> list[int]:
    """Of request 0, undrafted."""
    rounds = Rounds(engine)
    rounds.run([constrained(0, kind, prompt(9, 0), sampling=SAMPLINGS[mode])])
    return rounds.emitted(0)


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
@pytest.mark.parametrize("drafts", ["true", "wrong", "forbidden", "past the end", "long"])
def test_drafts_change_nothing(engine: Engine, mode: str, drafts: str) -> None:
    """Not even of the random choices: drafted or not, a seed has one text."""
    truth = answer(engine, mode)
    sizes = {"past the end": 40, "long": 30}

    def drafter(rid: int, ids: Sequence[int]) -> Draft:
        rest = truth[len(ids) - 9 :][: sizes.get(drafts, 5)]
        if drafts == "wrong" and rest:
            rest[len(ids) % len(rest)] = another(rest[len(ids) % len(rest)])
        if drafts == "forbidden":
            rest.insert(len(ids) % 3, TEXTS.index("~"))
        if drafts == "past the end":
            rest += [5] * 5
        return Draft(ids=rest[: 95 - len(ids)])

    rounds = Rounds(engine)
    rounds.run([constrained(0, "json_schema", prompt(9, 0), sampling=SAMPLINGS[mode])], drafter)
    assert rounds.emitted(0) == truth
    num_steps = len(rounds.committed[0])
    if drafts in ("true", "past the end", "long"):
        # Every draft is right, and so is each token behind them.
        assert num_steps <= 2 + len(truth) / {"true": 6}.get(drafts, 17)
    if drafts == "forbidden":
        assert rounds.num_accepted[0] <= 2 * num_steps


def test_a_forbidden_draft_has_no_probability(engine: Engine) -> None:
    """In rejection mode too, where the drafter was sure of it."""
    forbidden = TEXTS.index("~")
    sure = SparseQ(ids=np.array([[forbidden]], np.int32), probs=np.ones((1, 1), np.float32))
    rounds = Rounds(engine)
    rounds.run(
        [
            constrained(rid, "regex", prompt(9, rid), sampling=SAMPLINGS["rejection"])
            for rid in range(8)
        ],
        lambda rid, ids: Draft(ids=[forbidden], q=sure),
    )
    for rid in range(8):
        assert rounds.num_accepted[rid] == 0
        assert has_form("regex", decode(rounds.emitted(rid)))


def test_the_end_inside_an_accepted_block(engine: Engine) -> None:
    truth = answer(engine, "greedy")
    rounds = Rounds(engine)
    rounds.add(constrained(0, "json_schema", prompt(9, 0)))
    rounds.run()
    rounds = Rounds(engine)
    rounds.add(constrained(1, "json_schema", prompt(9, 0)))
    while len(rounds.ids[1]) < 9 + len(truth) - 3:
        rounds.step()
    result = rounds.step(lambda rid, ids: Draft(ids=[*truth[-3:], END, 7, 7]))
    assert result.token_ids.tolist() == truth[-3:]
    assert result.finish.tolist() == [FINISH_STOP]
    assert list(rounds.committed[1][-1].ids) == truth[-3:]
    assert result.free_kv_blocks == engine.limits.kv_blocks


# --- continued answers ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
def test_a_continued_answer_goes_on(engine: Engine, mode: str) -> None:
    """From every place: what was emitted has moved the form on."""
    truth = answer(engine, mode)
    ids = prompt(9, 0)
    rounds = Rounds(engine)
    first = constrained(0, "json_schema", ids, sampling=SAMPLINGS[mode])
    for place in range(1, len(truth)):
        known = np.array([*ids, *truth[:place]], np.int32)
        rounds.add(dataclasses.replace(first, rid=place, ids=known))
    rounds.run(drafter=garbage)
    assert not rounds.refused
    for place in range(1, len(truth)):
        assert rounds.emitted(place) == truth, place


def outcome_of(engine: Engine, bad: Admission) -> list[tuple[int, str]]:
    """Failures, beside a request that goes on and says what it would have said alone."""
    rounds = Rounds(engine)
    rounds.add(make_admission(100, prompt(5, 1), max_new_tokens=12))
    rounds.step()
    failures: list[tuple[int, str]] = []
    admissions: tuple[Admission, ...] = (bad,)
    for _ in range(_MAX_IDLE_STEPS):
        result = engine.step(make_step(admissions=admissions)).result
        failures += [(failure.rid, failure.code) for failure in result.failures]
        admissions = ()
        if failures:
            break
    row = Row(rid=bad.rid, ids=bad.ids.tolist())
    assert engine.step(make_step([row])).result.failures[0].code == "StaleFrame", "it is still here"
    rounds.run()
    assert len(rounds.emitted(100)) == 12
    return failures


@pytest.mark.parametrize(
    "emitted", ['{"name"; ', "{}", "x", '{"name":"abc","rank":1234', '{"name":"abcdefghi"']
)
def test_a_continuation_that_does_not_fit(engine: Engine, emitted: str) -> None:
    """It ends with its error, once, and whoever is beside it goes on."""
    ids = [*prompt(9, 0), *encode(emitted)]
    late = constrained(0, "json_schema", ids, num_prompt=9)
    assert outcome_of(engine, late) == [(0, "BadConstraint")]


@pytest.mark.parametrize("rest", [[], [5]])
def test_an_answer_that_has_ended_is_not_continued(engine: Engine, rest: list[int]) -> None:
    """Behind its end the form says nothing: what came would have none."""
    ids = [*prompt(9, 0), *encode("yes"), END, *rest]
    late = constrained(0, "choice", ids, num_prompt=9)
    assert outcome_of(engine, late) == [(0, "BadConstraint")]


# --- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type": "nonsense"}'),
        ("json_schema", '{"type": "array", "items": {"type": "integer", "multipleOf": 3}}'),
        ("json_schema", '{"$ref": "#/$defs/missing"}'),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 1}'),
        ("json_schema", "not json"),
        ("regex", "(ab"),
        ("regex", "a{4,2}"),
        ("regex", "[z-a]"),
        ("grammar", "root ::= missing"),
        ("grammar", "no rule at all"),
        ("grammar", "   "),
        ("choice", "[]"),
        ("choice", "yes"),
        ("poem", "sonnet"),
    ],
)
def test_bad_constraints(engine: Engine, kind: str, text: str) -> None:
    """Refused before anything runs, as the user's mistake, saying which kind."""
    bad = make_admission(
        0,
        [1, 2],
        stop_ids=np.array([END], np.int32),
        constraint_kind=kind,
        constraint=text,
    )
    with pytest.raises(BadConstraint, match=kind):
        engine.check(bad)
    rounds = Rounds(engine)
    rounds.run([bad, make_admission(1, [1, 2])])
    assert rounds.refused == {0: "BadConstraint"}


def test_a_constraint_needs_an_end(engine: Engine) -> None:
    """Without a stop token no answer would ever be whole."""
    with pytest.raises(BadConstraint, match="stop token") as caught:
        engine.check(make_admission(0, [1, 2], constraint_kind="json_object"))
    assert "ignore_eos" in caught.value.hint


def test_a_backend_that_fails(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """That request ends, not the step."""

    def grammar_init(request: Any) -> None:
        raise ValueError("no such vocabulary")

    manager = engine._core._core.structured_output_manager  # type: ignore[attr-defined]
    monkeypatch.setattr(manager, "grammar_init", grammar_init)
    bad = constrained(0, "json_schema", prompt(9, 0))
    assert outcome_of(engine, bad) == [(0, "BadConstraint")]
    monkeypatch.undo()
    assert has_form("choice", decode(answer(engine, "greedy", "choice")))


def test_a_form_that_no_token_can_say(engine: Engine) -> None:
    """The tokenizer lacks the letter: that request ends with an error."""
    bad = make_admission(
        0,
        prompt(9, 0),
        stop_ids=np.array([END], np.int32),
        constraint_kind="choice",
        constraint=choice_text(["\u00fc"]),
    )
    assert outcome_of(engine, bad) == [(0, "BadConstraint")]


def test_length_cuts_a_constrained_answer(engine: Engine) -> None:
    rounds = Rounds(engine)
    rounds.run([constrained(0, "json_schema", prompt(9, 0), max_new_tokens=4)], garbage)
    assert decode(rounds.emitted(0)) == decode(answer(engine, "greedy")[:4])
