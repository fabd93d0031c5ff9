"""Rounds offline: the text is the target's own, and every figure of a round adds up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import BadSamplingParameter, ConfigError, ModelNotFound, PromptTooLong
from deploy.offline.opening import kv_tokens_for
from deploy.offline.rounds import Answer, LocalPair, Prompt, Round
from tests.deploy.offline.oracle_drafter import OracleDrafter
from tests.deploy.random_drafter import write_random_drafter
from tests.verifier_service.torch_targets import (
    VOCAB_SIZE,
    make_engine,
    prompt,
    reference_greedy,
    save_llama,
)

NEW = 12
LENGTHS = (3, 17, 8, 30, 5)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_llama(folder)
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return [
        Prompt(ids=tuple(prompt(length, seed=i)), source=f"s{i % 2}", domain="math")
        for i, length in enumerate(LENGTHS)
    ]


@pytest.fixture(scope="module")
def texts(target: Path, prompts: list[Prompt]) -> dict[int, list[int]]:
    """Greedy continuations by transformers, prompt included."""
    from tests.verifier_service.torch_targets import load_reference

    model = load_reference(target)
    return {i: [*one.ids, *reference_greedy(model, one.ids, NEW)] for i, one in enumerate(prompts)}


def play(
    pair: LocalPair, prompts: Sequence[Prompt], **changes: Any
) -> tuple[list[Round], dict[int, Answer]]:
    """Rounds and answers of a greedy run of twelve tokens, three requests at a time."""
    settings: dict[str, Any] = {
        "temperature": 0.0,
        "mode": "coupled",
        "max_new_tokens": NEW,
        "concurrency": 3,
        "seed": 0,
    }
    events = list(pair.play(prompts, **{**settings, **changes}))
    rounds = [event for event in events if isinstance(event, Round)]
    answers = {event.prompt: event for event in events if isinstance(event, Answer)}
    assert len(rounds) + len(answers) == len(events)
    assert sorted(answers) == list(range(len(prompts)))
    for index, answer in answers.items():
        emitted = sum(one.num_emitted for one in rounds if one.prompt == index)
        assert emitted + 1 == len(answer.token_ids), "the prefill gives the first token"
    return rounds, answers


def oracle(texts: dict[int, list[int]], **changes: Any) -> OracleDrafter:
    return OracleDrafter(texts, vocab_size=VOCAB_SIZE, **changes)


def stop_at_third(texts: dict[int, list[int]]) -> tuple[int, int]:
    """A prompt whose first round's third token occurs in its answer first there, and that token."""
    for index, text in texts.items():
        answer = text[LENGTHS[index] :]
        if answer[3] not in answer[:3]:
            return index, answer[3]
    raise AssertionError("no such text: choose other prompts")


def same_text(answers: dict[int, Answer], texts: dict[int, list[int]]) -> bool:
    return {i: list(a.token_ids) for i, a in answers.items()} == {
        i: text[LENGTHS[i] :] for i, text in texts.items()
    }


def test_plain_rounds_give_the_targets_own_text(
    target: Path, prompts: list[Prompt], texts: dict[int, list[int]]
) -> None:
    rounds, answers = play(LocalPair(make_engine(target), None), prompts)
    assert same_text(answers, texts)
    assert {one.num_emitted for one in rounds} == {1}
    assert {(one.draft_ids, one.num_verified, one.reached) for one in rounds} == {((), 0, 0)}


def test_a_trained_type_of_drafter_gives_the_same_text(
    target: Path, prompts: list[Prompt], texts: dict[int, list[int]], tmp_path: Path
) -> None:
    """The real draft engine, features and all, however bad its random weights."""
    drafter = write_random_drafter(tmp_path, target)
    pair = LocalPair.open(target, drafter, device="cpu")
    rounds, answers = play(pair, prompts)
    assert same_text(answers, texts)
    assert pair.num_lost == 0
    full = [one for one in rounds if one.draft_ids]
    assert len(full) > len(rounds) // 2
    assert all(len(one.confidence) == len(one.draft_ids) == 4 for one in full)


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_sampled_rounds_repeat_by_seed(
    target: Path, prompts: list[Prompt], tmp_path: Path, mode: str
) -> None:
    pair = LocalPair.open(target, write_random_drafter(tmp_path, target), device="cpu")
    first, answers = play(pair, prompts, temperature=1.0, mode=mode)
    assert {one.regime for one in first} == {mode}
    again, same = play(pair, prompts, temperature=1.0, mode=mode)
    assert (again, same) == (first, answers)
    _, other = play(pair, prompts, temperature=1.0, mode=mode, seed=1)
    assert other != answers


def test_coupled_text_does_not_depend_on_the_drafter_or_on_company(
    target: Path, prompts: list[Prompt], tmp_path: Path
) -> None:
    drafted = LocalPair.open(target, write_random_drafter(tmp_path, target), device="cpu")
    plain = LocalPair(make_engine(target), None)
    _, expected = play(plain, prompts, temperature=1.0)
    assert play(drafted, prompts, temperature=1.0, concurrency=1)[1] == expected
    assert play(drafted, prompts, temperature=1.0, concurrency=5)[1] == expected


def test_right_blocks_are_accepted_whole(
    target: Path, prompts: list[Prompt], texts: dict[int, list[int]]
) -> None:
    drafter = oracle(texts)
    rounds, answers = play(LocalPair(make_engine(target), drafter), prompts)
    assert same_text(answers, texts)
    assert drafter.num_sessions == 0, "every session was released"
    # Of 12 tokens the prefill gives 1, two rounds 5 each, and the last 1 goes plain.
    for index in range(len(prompts)):
        mine = [one for one in rounds if one.prompt == index]
        assert [one.num_emitted for one in mine] == [5, 5, 1]
        assert [one.num_verified for one in mine] == [4, 4, 0]
        assert [one.reached for one in mine] == [4, 4, 0]
        assert [one.anchor for one in mine] == [LENGTHS[index] + n for n in (0, 5, 10)]
        assert mine[0].confidence == pytest.approx([0.9, 0.7, 0.5, 0.3])
        assert mine[0].source == f"s{index % 2}"


def test_a_request_near_its_end_verifies_less(
    target: Path, prompts: list[Prompt], texts: dict[int, list[int]]
) -> None:
    rounds, _ = play(LocalPair(make_engine(target), oracle(texts)), prompts, max_new_tokens=9)
    mine = [one for one in rounds if one.prompt == 0]
    assert [(one.num_verified, one.num_emitted, one.reached) for one in mine] == [
        (4, 5, 4),
        (2, 3, 2),
    ]
    assert len(mine[1].draft_ids) == 4, "the block is kept whole"


def test_the_first_wrong_draft_is_reached_and_later_ones_are_not(
    target: Path, prompts: list[Prompt], texts: dict[int, list[int]]
) -> None:
    pair = LocalPair(make_engine(target), oracle(texts, num_right=lambda anchor: 2))
    rounds, answers = play(pair, prompts)
    assert same_text(answers, texts)
    whole = [one for one in rounds if one.num_verified == 4]
    assert whole
    assert {(one.num_accepted, one.num_emitted, one.reached) for one in whole} == {(2, 3, 3)}


def test_what_a_stop_id_cuts_off_is_not_reached(
    target: Path, prompts: list[Prompt], texts: dict[int, list[int]]
) -> None:
    """The third token after the first anchor ends the answer: accepted, and the last one known."""
    index, stop = stop_at_third(texts)
    pair = LocalPair(make_engine(target), oracle({0: texts[index]}), stop_ids=[stop])
    rounds, answers = play(pair, [prompts[index]])
    assert answers[0].finish == "stop"
    assert answers[0].token_ids[-1] == stop
    assert [(r.num_verified, r.num_accepted, r.num_emitted, r.reached) for r in rounds] == [
        (4, 3, 3, 3)
    ]


def test_a_stop_id_as_the_correction_leaves_the_refusal_known(
    target: Path, prompts: list[Prompt], texts: dict[int, list[int]]
) -> None:
    index, stop = stop_at_third(texts)
    drafter = oracle({0: texts[index]}, num_right=lambda anchor: 2)
    pair = LocalPair(make_engine(target), drafter, stop_ids=[stop])
    rounds, _ = play(pair, [prompts[index]])
    assert [(r.num_accepted, r.num_emitted, r.reached) for r in rounds] == [(2, 3, 3)]


def test_requests_whose_session_is_lost_go_on_plainly(
    target: Path, prompts: list[Prompt], texts: dict[int, list[int]]
) -> None:
    pair = LocalPair(make_engine(target), oracle(texts, forget_at=20))
    rounds, answers = play(pair, prompts)
    assert same_text(answers, texts)
    assert pair.num_lost == 2  # of the prompts of 17 and 30 tokens
    assert {one.num_verified for one in rounds if one.prompt == 3} == {0}
    assert {one.num_verified for one in rounds if one.prompt == 0} > {4}


def test_draft_batches_are_bounded_and_change_nothing(
    target: Path, prompts: list[Prompt], texts: dict[int, list[int]]
) -> None:
    drafter = oracle(texts)
    pair = LocalPair(make_engine(target), drafter)
    at_once, _ = play(pair, prompts, concurrency=5)
    assert max(drafter.batches) == 5
    drafter.batches.clear()
    bounded, answers = play(pair, prompts, concurrency=5, draft_batch=2)
    assert same_text(answers, texts)
    assert max(drafter.batches) == 2
    assert {one.draft_batch for one in bounded if one.draft_ids} <= {1, 2}
    assert max(one.draft_batch for one in at_once) == 5
    assert [r.num_emitted for r in bounded] == [r.num_emitted for r in at_once]


def test_little_room_only_makes_requests_wait(
    target: Path, prompts: list[Prompt], texts: dict[int, list[int]]
) -> None:
    """KV for about two requests, steps of eight tokens: blocks are kept while a row waits."""
    engine = make_engine(target, kv_tokens=96, max_step_tokens=8)
    rounds, answers = play(LocalPair(engine, oracle(texts)), prompts, concurrency=5)
    assert same_text(answers, texts)
    assert [one.num_emitted for one in rounds if one.prompt == 3] == [5, 5, 1]


def test_parameters_are_checked_before_any_round(target: Path, prompts: list[Prompt]) -> None:
    pair = LocalPair(make_engine(target), None)
    with pytest.raises(BadSamplingParameter, match="temperature"):
        play(pair, prompts, temperature=-1.0)
    with pytest.raises(BadSamplingParameter, match="mode"):
        play(pair, prompts, mode="greedy")
    for wrong in ({"concurrency": 0}, {"max_new_tokens": 0}, {"draft_batch": 0}, {"seed": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            play(pair, prompts, **wrong)
    long = Prompt(ids=tuple(prompt(600)), source="long", domain="chat")
    with pytest.raises(PromptTooLong, match=r"prompt 5 \(long\): 600 tokens"):
        play(pair, [*prompts, long])


def test_an_abandoned_run_leaves_nothing_behind(
    target: Path, prompts: list[Prompt], texts: dict[int, list[int]]
) -> None:
    drafter = oracle(texts)
    pair = LocalPair(make_engine(target), drafter)
    run = pair.run(
        prompts, temperature=0, mode="coupled", max_new_tokens=NEW, concurrency=3, seed=0
    )
    next(run)
    assert drafter.num_sessions == 3
    run.close()
    assert drafter.num_sessions == 0
    assert same_text(play(pair, prompts)[1], texts)


def test_an_unknown_drafter_is_named(target: Path) -> None:
    with pytest.raises(ModelNotFound, match="no drafter 'nonsense'"):
        LocalPair.open(target, "nonsense")


def test_kv_is_for_the_longest_requests_that_can_meet(prompts: list[Prompt]) -> None:
    """In blocks of 16, the longest first: 42, 29, 20, 17 and 15 positions with the answers."""

    def positions(concurrency: int, max_new_tokens: int = NEW) -> int:
        return kv_tokens_for(
            prompts, max_new_tokens=max_new_tokens, max_positions=100_000, concurrency=concurrency
        )

    assert [positions(concurrency) for concurrency in (1, 2, 5, 99)] == [48, 80, 160, 160]
    assert positions(5, max_new_tokens=20_000) == 1 << 16, "a bound"
    assert positions(5, max_new_tokens=1 << 20) == 100_000, "but one request always fits"
