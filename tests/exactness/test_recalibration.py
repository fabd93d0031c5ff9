"""Rejection mode with a map that each round changes, enumerated: the joint laws stay the target's.

The production pieces decide: `DraftLengths` with its `Recalibrator`, which here jumps to
conclusions (no prior to speak of, a new fit after every sample) so that what one round teaches
really moves the lengths of the next.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest

from cluster.config import SchedulingConfig
from cluster.noise import Stream
from cluster.sparse import SparseQ
from drafter_service.sampling import Block
from router.blocks import DraftBlock
from router.counters import LaneCounters
from router.draft_lengths import DraftLengths, Judged
from router.lane_request import Emission, LaneRequest
from router.recalibration import Recalibrator
from router.step_load import StepLoad
from router.throughput import ThroughputProfile
from tests.exactness.test_rejection import draft_all, markov_pair, round_law, verify_cells
from tests.exactness.tiny import Injected, gap, sampling

PAIR = markov_pair()
ONE_ROW = (1.0, 1.5, 2.1)
"""Seconds of steps of 1, 2 and 3 tokens: one draft, or two, or none may pay."""
Ids = tuple[int, ...]


class Round(NamedTuple):
    """One outcome of one round of a request, its probability, and the lane behind it."""

    weight: float
    ids: Ids
    length: int
    lane: Lane


class Lane:
    """Production's decisions and the learning between them; copied where outcomes part."""

    def __init__(self, step_s: tuple[float, ...] = ONE_ROW, explore_fraction: float = 0.0) -> None:
        tokens = np.arange(1, len(step_s) + 1, dtype=np.int32)
        self.counters = LaneCounters()
        self.recalibrator = Recalibrator(min_samples=1)
        profile = ThroughputProfile(tokens, np.array(step_s, np.float32))
        profile.live = False
        self.lengths = DraftLengths(
            recalibrator=self.recalibrator,
            profile=profile,
            counters=self.counters,
            explore_fraction=explore_fraction,
            scheduling=SchedulingConfig(policy="causal"),
        )

    def choose(self, block: Block, contexts: list[Ids], room: int = 99) -> list[int]:
        """Draft lengths of one step: request r has id r."""
        self.rows = [row_of(r, ids, block) for r, ids in enumerate(contexts)]
        num_rows = len(self.rows)
        load = StepLoad(num_rows=num_rows, num_tokens=num_rows)
        return self.lengths.choose(self.rows, load=load, room=room)

    def learn(self, num_verified: int, num_accepted: int, ids: Ids) -> None:
        """The outcome of the step's one row."""
        (row,) = self.rows
        assert row.block is not None
        emission = Emission(
            rid=row.rid,
            token_ids=ids,
            logprobs=(0.0,) * len(ids),
            finish=0,
            is_round=True,
            num_verified=num_verified,
            num_accepted=num_accepted,
        )
        self.lengths.learn([Judged(row.block, row.regime, emission)])


Choose = Callable[[Lane, Block, Ids], int]


def as_served(lane: Lane, block: Block, context: Ids) -> int:
    return lane.choose(block, [context])[0]


def row_of(r: int, context: Ids, block: Block) -> LaneRequest:
    request = LaneRequest(
        rid=r,
        ids=list(context),
        num_prompt=1,
        max_new_tokens=100,
        stop_ids=(),
        sampling=sampling(mode="rejection"),
        draft=True,
    )
    request.block = DraftBlock(
        rid=r,
        epoch=0,
        anchor=request.anchor,
        digest=0,
        ids=tuple(block.ids[r].tolist()),
        confidence=block.confidence[r].astype(np.float64),
        q=SparseQ(ids=block.q_ids[r], probs=block.q_probs[r]),
    )
    return request


@functools.cache
def drafted(anchor: int) -> list[tuple[Block, float]]:
    """All blocks behind this id, with their probabilities."""
    return draft_all(PAIR, 1, anchor)


@functools.cache
def judged(anchor: int, n: int, length: int) -> dict[tuple[Ids, int], float]:
    """Law of (emitted ids, accepted drafts) when so much of the n-th block is verified."""
    block, _ = drafted(anchor)[n]
    points, shares = verify_cells(PAIR, anchor, block.ids[0, :length].tolist(), ends=True)
    num = len(shares)
    accepts, finals = np.zeros((num, 1, PAIR.gamma + 2)), np.zeros((num, 1, PAIR.gamma + 2))
    accepts[:, 0, 1 : length + 1] = points[:, :-1]
    finals[:] = points[:, -1, None, None]
    verdicts = PAIR.verify(
        [(anchor,)] * num,
        [sampling(seed=seed, mode="rejection") for seed in range(num)],
        Block(**{name: np.repeat(part, num, axis=0) for name, part in vars(block).items()}),
        np.full(num, length),
        Injected({Stream.ACCEPT: accepts, Stream.RESIDUAL: finals, Stream.BONUS: finals}),
    )
    law: dict[tuple[Ids, int], float] = {}
    for verdict, share in zip(verdicts, shares, strict=True):
        key = (verdict.token_ids, verdict.num_accepted)
        law[key] = law.get(key, 0.0) + share
    return law


def rounds(lane: Lane, context: Ids, choose: Choose = as_served) -> Iterator[Round]:
    """All outcomes of a round behind ``context``: drafted, cut, judged, learnt from.

    The laws are Markov and the numbers of a round are keyed by its own anchor, so a round looks at
    the last id only, and its numbers are enumerated anew.
    """
    anchor = context[-1]
    for n, (block, weight) in enumerate(drafted(anchor)):
        after = copy.deepcopy(lane)
        length = choose(after, block, context)
        for (ids, num_accepted), share in judged(anchor, n, length).items():
            learnt = copy.deepcopy(after)
            learnt.learn(length, num_accepted, ids)
            yield Round(weight * share, ids, length, learnt)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample is enough to move a map a long way."""
    monkeypatch.setattr("router.recalibration._REFIT_EVERY", 1)
    monkeypatch.setattr("router.recalibration._SLOPE_PRIOR", 0.5)
    monkeypatch.setattr("router.recalibration._SHIFT_PRIOR", 0.2)


def two_rounds(lane: Lane, choose: Choose = as_served) -> tuple[float, set[int]]:
    """Distance of the law of two successive rounds from the target's, and second lengths seen."""
    total = 2 * (PAIR.gamma + 1)
    law: dict[Ids, float] = {}
    seen = set()
    for first in rounds(lane, (0,), choose):
        for second in rounds(first.lane, (0, *first.ids), choose):
            seen.add(second.length)
            whole = first.ids + second.ids
            law[whole] = law.get(whole, 0.0) + first.weight * second.weight
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    return gap(PAIR.complete(law, total), PAIR.sequence_law(0, total)), seen


@pytest.mark.parametrize("explore_fraction", [0.0, 0.3])
def test_two_rounds_with_learning_between_are_exact(explore_fraction: float) -> None:
    distance, seen = two_rounds(Lane(explore_fraction=explore_fraction))
    assert len(seen) > 1, "the schedule never varied: nothing was tested"
    assert distance < 1e-12


def test_what_the_first_round_taught_decides_in_the_second() -> None:
    """The enumeration above is no trivial one: the same block is cut differently."""
    block, _ = drafted(1)[0]
    lengths = {as_served(first.lane, block, (0, 1)) for first in rounds(Lane(), (0,))}
    assert len(lengths) > 1


def test_a_rule_that_looks_at_the_draft_is_found_out() -> None:
    """Whole blocks for those that begin with a likely token: the mistake that must not be."""

    def peeking(lane: Lane, block: Block, context: Ids) -> int:
        as_served(lane, block, context)
        return 2 if block.ids[0, 0] == 0 else 0

    distance, _ = two_rounds(Lane(), peeking)
    assert distance > 1e-3


def test_one_requests_outcomes_move_anothers_map_and_both_stay_exact() -> None:
    """A's round teaches B's, and B's teaches A's second one: the joint law is the product law."""
    law: dict[Ids, float] = {}
    seen = set()
    for a in rounds(Lane(), (0,)):
        for b in rounds(a.lane, (1,)):
            for again in rounds(b.lane, (0, *a.ids)):
                seen.add((a.length, b.length, again.length))
                weight = a.weight * b.weight * again.weight
                for text, share in PAIR.complete({a.ids + again.ids: weight}, 4).items():
                    for other, part in PAIR.complete({b.ids: share}, 3).items():
                        law[text + other] = law.get(text + other, 0.0) + part
    assert len({lengths[1:] for lengths in seen}) > 3
    texts, others = PAIR.sequence_law(0, 4), PAIR.sequence_law(1, 3)
    wanted = {a + b: v * w for a, v in texts.items() for b, w in others.items()}
    assert gap(law, wanted) < 1e-12


@pytest.mark.parametrize("room", [3, 4])
def test_widening_after_the_walk_is_exact_with_room_for_all_and_for_some(room: int) -> None:
    """Two rows share the step's last places: who gets them depends on admitted tokens only."""
    cut = []

    def choose(survival_RG: np.ndarray, block: Block) -> np.ndarray:
        lane = Lane((1.0, 1.0, 1.33, 1.61, 1.92, 2.17), explore_fraction=1.0)
        lengths = lane.choose(block, [(0,), (0,)], room)
        cut.append((tuple(lengths), lane.counters.num_explored))
        return np.array(lengths)

    joint, _ = round_law(PAIR, choose, 2)
    assert all(sum(lengths) == room for lengths, _ in cut)
    assert len(set(cut)) == 3, "who was widened, and by how much, varied with the drawn tokens"
    law: dict[Ids, float] = {}
    for (first, second), weight in joint.items():
        for left, share in PAIR.complete({first: weight}, 3).items():
            for right, part in PAIR.complete({second: share}, 3).items():
                law[left + right] = law.get(left + right, 0.0) + part
    single = PAIR.sequence_law(0, 3)
    wanted = {a + b: v * w for a, v in single.items() for b, w in single.items()}
    assert gap(law, wanted) < 1e-12
