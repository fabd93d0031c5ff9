"""The demo's arithmetic and its honesty about differing texts."""

from __future__ import annotations

import pytest

from dspark.demo.figures import Answer, as_json, differences, summarise, verdict
from dspark.messages import Usage


def answer(
    ids: tuple[int, ...], logprobs: tuple[float, ...] | None = None, *, rounds: int = 1
) -> Answer:
    return Answer(
        name="math: x",
        text="",
        token_ids=ids,
        logprobs=logprobs or (-1.0,) * len(ids),
        usage=Usage(
            prompt_tokens=4,
            completion_tokens=len(ids),
            rounds=rounds,
            proposed=10,
            verified=6,
            accepted=3,
            ttft_s=0.1,
            total_s=2.0,
            seed=0,
        ),
        first_s=0.5,
        total_s=2.0,
    )


def test_summary_counts_tokens_rounds_and_drafts() -> None:
    side = summarise([answer((1,) * 9, rounds=4), answer((1,) * 5, rounds=2)], wall_s=2.0)
    assert side.tokens_per_s_total == 7.0
    assert side.tokens_per_s_user == pytest.approx((4.5 + 2.5) / 2)
    assert side.accepted_length == 2.0  # (14 - 2 first tokens) / 6 rounds
    assert (side.proposed, side.verified, side.accepted) == (20, 12, 6)
    assert side.ttft_s == 0.5


def test_plain_decoding_has_accepted_length_one() -> None:
    assert summarise([answer((1,) * 9, rounds=8)], wall_s=1.0).accepted_length == 1.0
    assert summarise([answer((1,), rounds=0)], wall_s=1.0).accepted_length == 1.0


def test_identical_texts_say_so() -> None:
    same = [answer((1, 2)), answer((3, 4))]
    assert differences(same, same) == ()
    assert "identical, all 2" in verdict((), 2)
    side = summarise(same, 1.0)
    assert as_json(side, side, ())["greedy_identical"] is True


def test_a_near_tie_is_told_from_a_real_difference() -> None:
    found = differences(
        [answer((1, 2, 3), (-1.0, -0.7000, -1.0)), answer((1, 2), (-1.0, -0.5))],
        [answer((1, 9, 8), (-1.0, -0.7005, -1.0)), answer((1, 3), (-1.0, -2.5))],
    )
    assert [(d.position, d.near_tie) for d in found] == [(1, True), (1, False)]
    assert "only near-ties differ" in verdict(found[:1], 2)
    assert "1 REAL DIFFERENCES" in verdict(found, 2)
    assert "token 1" in verdict(found, 2)
    side = summarise([answer((1, 2))], 1.0)
    assert as_json(side, side, found)["greedy_identical"] is False


def test_an_answer_that_ends_early_is_a_real_difference() -> None:
    (found,) = differences([answer((1, 2, 3))], [answer((1, 2))])
    assert (found.position, found.near_tie) == (2, False)
    assert "ends at token 2" in verdict([found], 1)


def test_json_has_exactly_the_agreed_keys() -> None:
    side = summarise([answer((1, 2))], 1.0)
    figures = as_json(side, side, ())
    assert list(figures) == ["drafted", "plain", "greedy_identical"]
    assert (
        set(figures["drafted"])
        == set(figures["plain"])
        == {
            "tokens_per_s_user",
            "tokens_per_s_total",
            "accepted_length",
            "proposed",
            "verified",
            "accepted",
            "ttft_s",
        }
    )
