"""How often a lane without drafts tries some."""

from __future__ import annotations

import numpy as np
import pytest

from router.draft_plan import DraftPlan
from router.draft_probes import ProbeLosses, probe
from router.lane_request import LaneRequest
from tests.frames import make_sampling

NUM = 16


def rows(crowd: int) -> list[LaneRequest]:
    """Requests of their own for each number: keys of other draws."""
    return [
        LaneRequest(
            rid=rid,
            ids=[1] * 5,
            num_prompt=4,
            max_new_tokens=100_000,
            stop_ids=frozenset(),
            sampling=make_sampling(),
            draft=True,
        )
        for rid in range(crowd * NUM, (crowd + 1) * NUM)
    ]


def plan(loss: float) -> DraftPlan:
    """Nothing is chosen; so much would be lost by asking, whoever is asked."""
    return DraftPlan(
        chosen=np.zeros(NUM, np.bool_),
        accepted=0.0,
        gain=1.0,
        gains=np.array([1.0] + [1 - loss] * NUM),
        plain_s=0.1,
    )


def share_of_rounds(losses: ProbeLosses, loss: float, *, num: int = 8_000) -> float:
    """In which something is asked."""
    asked = [
        probe(rows(n), set(), plan(loss), losses, num_rows=NUM, num_rounds=1, shared=True)
        for n in range(num)
    ]
    return float(np.mean([bool(some) for some in asked]))


def test_a_probe_is_as_rare_as_it_was_seen_to_cost() -> None:
    losses = ProbeLosses()
    assert share_of_rounds(losses, 0.02) == pytest.approx(1 / 64, rel=0.25), "the most often"
    for _ in range(40):
        losses.observe(NUM, 4, 0.6)
    assert losses.at(NUM, 4) == pytest.approx(0.6, rel=1e-3)
    assert losses.at(NUM, NUM) == 0.0, "of asking all, nothing is known"
    assert losses.at(4 * NUM, 4) == 0.0, "nor of another load"
    # A few: 0.003 / 0.6. All: an eighth of 1/64, for they are believed to lose 0.02.
    assert share_of_rounds(losses, 0.02) == pytest.approx(0.005, rel=0.3)
    assert share_of_rounds(losses, 0.5) == pytest.approx(0.003, rel=0.4), "the worse counts"


def test_a_freak_hardly_counts_a_lasting_loss_is_followed_and_gains_lose_nothing() -> None:
    losses = ProbeLosses()
    losses.observe(NUM, 4, 1e9)
    assert losses.at(NUM, 4) == 0.5, "half a round"
    for _ in range(12):
        losses.observe(NUM, 4, 30.0)
    assert losses.at(NUM, 4) > 20
    for _ in range(60):
        losses.observe(NUM, 4, -0.5)
    assert losses.at(NUM, 4) == pytest.approx(-0.5, abs=0.01)
    assert share_of_rounds(losses, 0.02) == pytest.approx(1 / 64, rel=0.25)
