"""How much of each block is verified: recalibrated survival, and rows verified whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from router.blocks import DraftBlock
from router.counters import LaneCounters
from router.draft_lengths import DraftLengths, Judged
from router.lane_request import Emission, LaneRequest
from router.recalibration import Recalibrator
from router.throughput import ThroughputProfile
from tests.frames import make_sampling

GAMMA = 4
STEEP = ((1, 100), (1.0, 100.0))
"""No draft ever pays: what is verified is verified to learn."""
MILD = ((1, 100), (30.5, 80.0))
"""30 + B/2: with 16 rows, a draft pays from a survival of about 0.3 on."""


def lengths_of(
    profile: tuple[tuple[int, ...], tuple[float, ...]] = MILD,
    *,
    recalibrator: Recalibrator | None = None,
    explore_fraction: float = 0.0,
) -> DraftLengths:
    tokens, step_s = profile
    return DraftLengths(
        recalibrator=recalibrator or Recalibrator(),
        profile=ThroughputProfile(np.array(tokens, np.int32), np.array(step_s, np.float32)),
        counters=LaneCounters(),
        explore_fraction=explore_fraction,
    )


def make_row(rid: int = 1, anchor: int = 5, **changes: Any) -> LaneRequest:
    """A request that has a block of confidence 0.9 in hand."""
    block = {"confidence": np.full(GAMMA, 0.9), "ids": (5,) * GAMMA} | {
        key: changes.pop(key) for key in ("confidence", "ids") if key in changes
    }
    values = {
        "ids": [2] * (anchor + 1),
        "num_prompt": 2,
        "max_new_tokens": 10_000,
        "stop_ids": (),
        "sampling": make_sampling(),
        "draft": True,
    }
    request = LaneRequest(rid=rid, **(values | changes))
    request.block = DraftBlock(rid=rid, epoch=0, anchor=anchor, digest=0, q=None, **block)
    return request


def judge(row: LaneRequest, num_verified: int, num_accepted: int, *, cut: int = 0) -> Judged:
    """The row's outcome; ``cut`` tokens fell off its end."""
    num_emitted = num_accepted + 1 - cut
    emission = Emission(
        rid=row.rid,
        token_ids=(1,) * num_emitted,
        logprobs=(0.0,) * num_emitted,
        finish=0,
        is_round=True,
        num_proposed=GAMMA,
        num_verified=num_verified,
        num_accepted=min(num_accepted, num_emitted),
    )
    assert row.block is not None
    return Judged(row.block, row.sampling, emission)


def widened(lengths: DraftLengths, rows: list[LaneRequest], room: int = 10_000) -> list[int]:
    """Rows that get drafts though none pays."""
    chosen = lengths.choose(rows, num_prefill=0, room=room)
    return [row.rid for row, n in zip(rows, chosen, strict=True) if n]


def test_rows_without_a_block_and_requests_near_their_end() -> None:
    plain, last, short = make_row(1), make_row(2, max_new_tokens=5), make_row(3, ids=(5, 6))
    plain.block = None
    assert last.block is not None
    assert short.block is not None
    short.block = DraftBlock(**(vars(short.block) | {"confidence": np.full(2, 0.9)}))
    lengths = lengths_of(((1,), (1.0,)))
    assert lengths.choose([plain, last, short], num_prefill=0, room=99) == [0, 0, 2]
    assert lengths_of(explore_fraction=1.0).choose([last], num_prefill=0, room=99) == [0]


def test_confidences_that_promise_too_much_are_not_believed_for_long() -> None:
    lengths = lengths_of()
    rows = [make_row(rid) for rid in range(16)]
    assert lengths.choose(rows, num_prefill=0, room=99) == [GAMMA] * 16
    for _ in range(10):
        lengths.learn([judge(row, GAMMA, 1) for row in rows])
    assert lengths.choose(rows, num_prefill=0, room=99) == [1] * 16


def test_lanes_share_what_they_learn() -> None:
    recalibrator = Recalibrator()
    one, other = lengths_of(recalibrator=recalibrator), lengths_of(recalibrator=recalibrator)
    rows = [make_row(rid) for rid in range(16)]
    for _ in range(10):
        one.learn([judge(row, GAMMA, 0) for row in rows])
    assert other.choose(rows, num_prefill=0, room=99) == [0] * 16


def test_the_counters_say_what_the_recalibrated_confidences_promised() -> None:
    recalibrator = Recalibrator()
    lengths = lengths_of(recalibrator=recalibrator)
    rows = [make_row(rid) for rid in range(16)]
    lengths.learn([judge(row, 2, 0) for row in rows])
    assert lengths._counters.expected_accepted == pytest.approx(16 * (0.9 + 0.81))
    for _ in range(100):
        lengths.learn([judge(row, 2, 0) for row in rows])
    before = lengths._counters.expected_accepted
    lengths.learn([judge(row, 2, 0) for row in rows])
    assert lengths._counters.expected_accepted - before < 1.0


@pytest.mark.parametrize(
    ("num_verified", "num_accepted", "cut", "samples", "accepted"),
    [
        (4, 4, 0, [1, 1, 1, 1], [1, 1, 1, 1]),
        (4, 1, 0, [1, 1], [1, 0]),  # behind the refused draft nothing is known
        (2, 2, 0, [1, 1], [1, 1]),  # behind the verified length neither
        (2, 0, 0, [1], [0]),
        (4, 3, 2, [1, 1], [1, 1]),  # a stop id was the second accepted draft
        (4, 2, 1, [1, 1], [1, 1]),  # no refusal: the text ended with the second accepted draft
        (4, 4, 3, [1, 1], [1, 1]),
        (0, 0, 0, [], []),
    ],
)
def test_learns_from_reached_positions_only(
    num_verified: int, num_accepted: int, cut: int, samples: list[int], accepted: list[int]
) -> None:
    recalibrator = Recalibrator()
    row = make_row()
    lengths_of(recalibrator=recalibrator).learn([judge(row, num_verified, num_accepted, cut=cut)])
    figures = recalibrator.figures()
    got = [figures.get(f"greedy.{k}.samples", 0) for k in range(1, GAMMA + 1)]
    assert got == samples + [0] * (GAMMA - len(samples))
    for k, share in enumerate(accepted, start=1):
        assert figures[f"greedy.{k}.accepted"] == share


# --- exploration ----------------------------------------------------------------------------------


def test_the_stated_share_is_explored_whoever_asks_and_wherever() -> None:
    lengths = lengths_of(STEEP, explore_fraction=1 / 16)
    rids = np.array(
        [
            widened_rid
            for anchor in range(2, 402)
            for widened_rid in widened(lengths, [make_row(rid, anchor) for rid in range(20)])
        ]
    )
    assert len(rids) == pytest.approx(8000 / 16, abs=4 * (8000 / 16) ** 0.5)
    each = np.bincount(rids, minlength=20)
    assert each.min() > 5, "no request is left out"
    assert lengths._counters.num_explored_rows == len(rids)
    assert lengths._counters.num_explored == GAMMA * len(rids)


def test_no_share_and_the_whole_share() -> None:
    rows = [make_row(rid) for rid in range(200)]
    assert widened(lengths_of(STEEP), rows) == []
    assert widened(lengths_of(STEEP, explore_fraction=1.0), rows) == list(range(200))


def test_who_is_explored_does_not_depend_on_drafts() -> None:
    """Same requests, same anchors: other tokens and confidences change nothing, order neither."""
    rng = np.random.default_rng(0)
    chosen = []
    for _ in range(5):
        rows = [
            make_row(
                rid,
                anchor=20,
                confidence=rng.uniform(0, 0.5, GAMMA),
                ids=tuple(rng.integers(0, 50, GAMMA).tolist()),
            )
            for rid in rng.permutation(300).tolist()
        ]
        chosen.append(sorted(widened(lengths_of(STEEP, explore_fraction=0.1), rows)))
    assert chosen[0]
    assert all(other == chosen[0] for other in chosen)


def test_exploring_leaves_the_other_rows_as_they_are() -> None:
    """A row that would get less is widened, the others get what they would have got."""
    rng = np.random.default_rng(1)
    rows = [make_row(rid, confidence=rng.uniform(0.2, 0.9, GAMMA)) for rid in range(40)]
    plain = lengths_of().choose(rows, num_prefill=0, room=200)
    explored = lengths_of(explore_fraction=0.2).choose(rows, num_prefill=0, room=200)
    changed = [(a, b) for a, b in zip(plain, explored, strict=True) if a != b]
    assert changed
    assert all(b == GAMMA for _, b in changed)


def test_exploring_stays_within_the_step() -> None:
    rows = [make_row(rid) for rid in range(5)]
    lengths = lengths_of(STEEP, explore_fraction=1.0)
    assert lengths.choose(rows, num_prefill=0, room=10) == [4, 4, 2, 0, 0]
    assert (lengths._counters.num_explored_rows, lengths._counters.num_explored) == (3, 10)
    near_end = make_row(9, anchor=5, max_new_tokens=7)
    assert lengths.choose([near_end], num_prefill=0, room=10) == [2], "the bonus ends the request"


@pytest.mark.parametrize("explore_fraction", [0.0, 1 / 16])
def test_exploring_keeps_the_tail_honest(explore_fraction: float) -> None:
    """A drafter that undersells its tail (0.05 where 0.8 survive) is cut to one draft; only the
    rows verified whole show that it may be trusted with more."""
    rng = np.random.default_rng(2)
    recalibrator = Recalibrator()
    lengths = lengths_of(recalibrator=recalibrator, explore_fraction=explore_fraction)
    reported = np.array([0.8, 0.05, 0.05, 0.05])
    first: list[int] = []
    last: list[int] = []
    for step in range(500):
        rows = [make_row(rid, anchor=10 + step, confidence=reported) for rid in range(16)]
        chosen = lengths.choose(rows, num_prefill=0, room=64)
        survives = (rng.random((16, GAMMA)) < 0.8).cumprod(axis=1).sum(axis=1)
        lengths.learn(
            [judge(row, n, min(n, a)) for row, n, a in zip(rows, chosen, survives, strict=True)]
        )
        if step < 50:
            first += chosen
        elif step >= 450:
            last += chosen
    assert np.median(first) == 1
    if explore_fraction:
        assert np.mean(last) > 2.5
        assert recalibrator.figures()["greedy.3.recalibrated"] > 0.6
    else:
        assert set(last) == {1}
        assert "greedy.2.samples" not in recalibrator.figures()
