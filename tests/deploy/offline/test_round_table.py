"""Which rounds count for what."""

from __future__ import annotations

import numpy as np
import pytest

from deploy.offline.prompts import Prompt
from tests.deploy.offline.made_rounds import make_round, make_table

# Of 10 prompt and 100 new tokens the last has position 109: a block of 4 and its bonus token fit
# behind anchors up to 104.


@pytest.mark.parametrize(
    ("changes", "whole"),
    [
        ({}, True),
        ({"anchor": 104}, True),
        ({"anchor": 105}, False),
        ({"draft_ids": (1, 7, 3, 4)}, False),
        ({"draft_ids": (1, 2, 3, 7)}, True),
        ({"num_verified": 3}, False),
        ({"draft_ids": (), "confidence": (), "num_verified": 0, "num_accepted": 0}, True),
    ],
    ids=["far", "just fits", "near the end", "stop", "stop last", "trimmed", "no block"],
)
def test_a_round_is_whole_by_what_was_known_before_it(
    changes: dict[str, object], whole: bool
) -> None:
    assert make_table([make_round(**changes)]).whole.tolist() == [whole]


def test_positions_by_what_became_of_them() -> None:
    rounds = [
        make_round(),
        make_round(num_accepted=4, num_emitted=5),
        make_round(draft_ids=(1, 2), confidence=(0.5, 0.25), num_verified=2, num_accepted=0),
    ]
    table = make_table(rounds)
    t, f = True, False
    assert table.drafted.tolist() == [[t, t, t, t], [t, t, t, t], [t, t, f, f]]
    assert table.survived.tolist() == [[t, t, f, f], [t, t, t, t], [f, f, f, f]]
    assert table.reached.tolist() == [[t, t, t, f], [t, t, t, t], [t, f, f, f]]
    np.testing.assert_allclose(table.survival[0], [0.9, 0.72, 0.36, 0.18])
    np.testing.assert_allclose(table.survival[2], [0.5, 0.125, 0, 0])


def test_domains_split_rounds_and_all_is_all() -> None:
    table = make_table([make_round(), make_round(domain="chat", prompt=1)])
    assert table.in_domain("chat").prompt.tolist() == [1]
    assert len(table.in_domain("all")) == 2


def test_the_requests_own_prompt_decides_where_it_ends() -> None:
    long = Prompt(ids=tuple(range(50)), source="s", domain="d")
    rounds = [make_round(anchor=120, prompt=0), make_round(anchor=120, prompt=1)]
    short = Prompt(ids=(1,), source="s", domain="d")
    assert make_table(rounds, [short, long]).whole.tolist() == [False, True]
