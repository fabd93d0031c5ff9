"""The simulated verifier's table: what a round comes to, against the texts."""

from __future__ import annotations

import numpy as np
import pytest

from cluster import digest
from cluster.sampling import plain_sampling
from cluster.wire import FINISH_LENGTH, FINISH_NONE, FINISH_STOP, Admission
from deploy.simulation.prompts import PromptQueue
from deploy.simulation.table import RequestTable, emitted
from deploy.simulation.text import text


def admission(rid: int, *, num_prompt: int = 10, most: int = 20, num_emitted: int = 0) -> Admission:
    return Admission(
        rid=rid,
        ids=np.array(text(rid, 0, num_prompt + num_emitted), np.int32),
        num_prompt=num_prompt,
        max_new_tokens=most,
        stop_ids=np.zeros(0, np.int32),
        sampling=plain_sampling(0.0, mode="coupled", seed=rid),
        drafter_id="",
        drafter_address="",
        session_epoch=0,
        want_draft=False,
    )


def table_of(*admissions: Admission, num_output: int = 20) -> RequestTable:
    table = RequestTable(4, 0)
    for one in admissions:
        table.add(one, num_output=num_output, traits_G=np.zeros(0))
    return table


@pytest.mark.parametrize(
    ("num_right", "num_draft", "accepted", "number"),
    [(0, 0, 0, 1), (4, 4, 4, 5), (2, 4, 2, 3), (0, 3, 0, 1)],
)
def test_a_round_accepts_what_the_text_says(
    num_right: int, num_draft: int, accepted: int, number: int
) -> None:
    table = table_of(admission(5), admission(6))
    slot = np.array([table.slot_of[6], table.slot_of[5]])
    drafts = text(6, 10, 10 + num_draft)
    drafts[num_right:] = [(token + 1) % 32_000 for token in drafts[num_right:]]
    rounds = table.rounds(slot, np.array([num_draft, 0]), np.array(drafts, np.int32))
    assert rounds.num_accepted_R.tolist() == [accepted, 0]
    assert rounds.num_emitted_R.tolist() == [number, 1]
    assert emitted(rounds).tolist() == text(6, 10, 10 + number) + text(5, 10, 11)
    assert table.anchor[slot].tolist() == [9 + number, 10]
    assert table.digest[slot].tolist() == [
        digest.of(text(6, 0, 10 + number)),
        digest.of(text(5, 0, 11)),
    ]
    assert (rounds.finish_R == FINISH_NONE).all()


@pytest.mark.parametrize(
    ("most", "num_output", "finish", "number"),
    [(3, 20, FINISH_LENGTH, 3), (20, 2, FINISH_STOP, 2), (2, 2, FINISH_LENGTH, 2)],
)
def test_a_round_ends_where_the_text_or_the_limit_does(
    most: int, num_output: int, finish: int, number: int
) -> None:
    table = table_of(admission(1, most=most), num_output=num_output)
    slot = np.array([table.slot_of[1]])
    rounds = table.rounds(slot, np.array([4]), np.array(text(1, 10, 14), np.int32))
    assert rounds.num_emitted_R.tolist() == [number]
    assert rounds.num_accepted_R.tolist() == [number]
    assert rounds.finish_R.tolist() == [finish]


def test_a_request_that_returns_goes_on_with_its_text() -> None:
    table = table_of(admission(3, num_emitted=18))
    slot = np.array([table.slot_of[3]])
    rounds = table.rounds(slot, np.array([0]), np.zeros(0, np.int32))
    assert emitted(rounds).tolist() == text(3, 28, 29)
    assert rounds.finish_R.tolist() == [FINISH_NONE]
    rounds = table.rounds(slot, np.array([0]), np.zeros(0, np.int32))
    assert rounds.finish_R.tolist() == [FINISH_LENGTH]


def test_prompts_are_computed_in_order_within_the_budget() -> None:
    table = table_of(*(admission(n, num_prompt=10) for n in range(1, 4)))
    queue = PromptQueue(table)
    for rid in range(1, 4):
        queue.add(rid)
    chunks = queue.take(16)
    assert (chunks.num_tokens, chunks.done) == (16, [table.slot_of[1]])
    assert chunks.sum_context == 10 + 6
    assert chunks.num_pairs == 10 * 10 + 6 * 6
    assert queue.num_tokens == 14
    table.remove(2)
    assert queue.num_tokens == 10
    assert queue.take(16).done == [table.slot_of[3]]
    assert queue.take(16) == (0, [], 0, 0)
