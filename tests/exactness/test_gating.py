"""Rejection mode with a draft gate, enumerated: asking by history leaves the joint laws the
target's; asking by what a block holds would not.

A first round draws a block and teaches the production gate (`DraftGate`, which here jumps to
conclusions and holds each decision for one round). Whether the second one has a block at all is
what the gate says; its numbers are keyed by its own anchor and enumerated anew.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

from cluster.config import SchedulingConfig
from drafter_service.sampling import Block
from router.counters import LaneCounters
from router.draft_outlook import Decoding
from router.drafter_book import DrafterBook, DrafterRef
from router.gating import DraftGate
from router.lane_request import Emission, LaneRequest
from router.recalibration import Recalibrator
from router.step_load import StepLoad
from router.throughput import ThroughputProfile
from tests.exactness.test_recalibration import PAIR, Ids, drafted, judged, row_of
from tests.exactness.tiny import gap, sampling

TOKENS = np.arange(1, 9, dtype=np.int32)
PROFILE = ThroughputProfile(TOKENS, np.array([1.0 + 0.33 * n for n in range(8)], np.float32))
REF = DrafterRef(drafter_id="a", address="", fingerprint="")


class Round(NamedTuple):
    """One outcome of one round of a request, its probability, and the gate behind it."""

    weight: float
    ids: Ids
    asks: bool
    gate: DraftGate


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate that knows every load, and believes the blocks that it sees."""
    monkeypatch.setattr("router.gate_rhythm._FIRST_ROUNDS", 0)
    monkeypatch.setattr("router.gate_rhythm._MOST_ROUNDS", 1)
    monkeypatch.setattr("router.draft_worth._KNOWN_BLOCKS", 0)
    monkeypatch.setattr("router.draft_worth._OWN_PRIOR", 0.1)
    monkeypatch.setattr("router.draft_worth._FIRST_WEIGHT", 0.1)
    monkeypatch.setattr("router.draft_worth._OWN_KEPT", 0.2)
    monkeypatch.setattr("router.draft_worth._OWN_TOLD_PRIOR", 0.1)


def make_gate(latency_s: float = 0.1) -> DraftGate:
    book = DrafterBook(bound_s=1.0)
    book.up(REF)
    link = book.link("a")
    assert link is not None
    link.observe(1, latency_s, latency_s)
    return DraftGate(
        book=book,
        recalibrator=Recalibrator(min_samples=np.inf),
        counters=LaneCounters(),
        scheduling=SchedulingConfig(gather="wait_for_all"),
    )


def rounds(
    gate: DraftGate, context: Ids, *, has_block: bool, length: int, rid: int = 0
) -> Iterator[Round]:
    """All outcomes of a round behind ``context``, and whether the next one is asked for."""
    anchor = context[-1]
    for n, (block, weight) in enumerate(drafted(anchor)):
        row = row_of(0, context, block)
        row.rid, row.drafter = rid, REF
        if not has_block:
            row.block = None
        after = copy.deepcopy(gate)
        num = length if has_block else 0
        load = StepLoad(num_rows=1, num_tokens=1)
        (asks,) = after.ask([row], [num], Decoding(load=load, times=PROFILE, room=7))
        for (ids, num_accepted), share in judged(anchor, n, num).items():
            learnt = copy.deepcopy(after)
            learnt.judge([_emission(row, ids, num, num_accepted)])
            yield Round(weight * share, ids, asks, learnt)


def _emission(row: LaneRequest, ids: Ids, num_verified: int, num_accepted: int) -> Emission:
    return Emission(
        rid=row.rid,
        token_ids=ids,
        logprobs=(0.0,) * len(ids),
        finish=0,
        is_round=True,
        num_verified=num_verified,
        num_accepted=num_accepted,
    )


def test_what_the_first_round_taught_decides_whether_there_is_a_second_block() -> None:
    """Three rounds: the second is asked for before the first has taught anything, the third is
    asked for or not. The whole law is the target's."""
    total = 3 * (PAIR.gamma + 1)
    law: dict[Ids, float] = {}
    seen = set()
    for first in rounds(make_gate(), (0,), has_block=True, length=2):
        for second in rounds(first.gate, (0, *first.ids), has_block=first.asks, length=2):
            seen.add((first.asks, second.asks))
            text = first.ids + second.ids
            weight = first.weight * second.weight
            for third in rounds(second.gate, (0, *text), has_block=second.asks, length=1):
                whole = text + third.ids
                law[whole] = law.get(whole, 0.0) + weight * third.weight
    assert {asks for _, asks in seen} == {True, False}, "the gate never differed"
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert gap(PAIR.complete(law, total), PAIR.sequence_law(0, total)) < 1e-12


def test_one_requests_blocks_decide_about_anothers_and_both_stay_exact() -> None:
    """The lane's means move with A's blocks; B is asked for or not by them: a product law still."""
    law: dict[Ids, float] = {}
    asked = set()
    for a in rounds(make_gate(0.75), (0,), has_block=True, length=2, rid=0):
        for b in rounds(a.gate, (1,), has_block=False, length=0, rid=5):
            asked.add(b.asks)
            for more in rounds(b.gate, (1, *b.ids), has_block=b.asks, length=2, rid=5):
                weight = a.weight * b.weight * more.weight
                for text, share in PAIR.complete({a.ids: weight}, 3).items():
                    for other, part in PAIR.complete({b.ids + more.ids: share}, 4).items():
                        law[text + other] = law.get(text + other, 0.0) + part
    assert asked == {True, False}
    texts, others = PAIR.sequence_law(0, 3), PAIR.sequence_law(1, 4)
    wanted = {a + b: v * w for a, v in texts.items() for b, w in others.items()}
    assert gap(law, wanted) < 1e-12


@pytest.mark.parametrize("looks", [False, True])
def test_to_drop_a_block_for_what_it_holds_would_be_biased(looks: bool) -> None:
    """Gating the block in hand by its own survival: the mistake that must not be. A gate that only
    decides before the draft, with the same share of plain rounds, is exact."""
    law: dict[Ids, float] = {}
    for n, (block, weight) in enumerate(drafted(0)):
        for keeps, share in ((True, 0.5), (False, 0.5)):
            kept = _is_good(block) if looks else keeps
            for (ids, _), part in judged(0, n, 2 if kept else 0).items():
                law[ids] = law.get(ids, 0.0) + weight * share * part
    total = PAIR.gamma + 1
    distance = gap(PAIR.complete(law, total), PAIR.sequence_law(0, total))
    assert distance > 1e-3 if looks else distance < 1e-12


def _is_good(block: Block) -> bool:
    return float(block.confidence[0].prod()) > 0.7


def test_a_gate_never_makes_a_difference_to_a_request_without_a_drafter() -> None:
    gate = make_gate()
    block, _ = drafted(0)[0]
    row = row_of(0, (0,), block)
    assert row.sampling == sampling(mode="rejection")
    load = StepLoad(num_rows=1, num_tokens=1)
    assert gate.ask([row], [1], Decoding(load=load, times=PROFILE, room=7)) == [False]
