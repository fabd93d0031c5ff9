"""How much of each block is verified: recalibrated survival, and rows verified whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.config import SchedulingConfig
from cluster.errors import ConfigError
from cluster.sparse import SparseQ
from router.blocks import DraftBlock
from router.counters import LaneCounters
from router.draft_lengths import DraftLengths, Judged
from router.lane_request import Emission, LaneRequest
from router.recalibration import Recalibrator
from router.step_load import StepLoad
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
    policy: str = "causal",
    live: bool = False,
) -> DraftLengths:
    """``live``: steps explore neighbouring tiers, too."""
    tokens, step_s = profile
    table = ThroughputProfile(np.array(tokens, np.int32), np.array(step_s, np.float32))
    table.live = live
    return DraftLengths(
        recalibrator=recalibrator or Recalibrator(),
        profile=table,
        counters=LaneCounters(),
        explore_fraction=explore_fraction,
        scheduling=SchedulingConfig(policy=policy),
    )


def load(num_rows: int, num_prefill: int = 0) -> StepLoad:
    return StepLoad(num_rows=num_rows, num_tokens=num_rows + num_prefill, num_prefill=num_prefill)


def choose(lengths: DraftLengths, rows: list[LaneRequest], room: int = 10_000) -> list[int]:
    return lengths.choose(rows, load=load(len(rows)), room=room)


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
    return Judged(row.block, row.regime, emission)


def widened(lengths: DraftLengths, rows: list[LaneRequest], room: int = 10_000) -> list[int]:
    """Rows that get drafts though none pays."""
    chosen = choose(lengths, rows, room)
    return [row.rid for row, n in zip(rows, chosen, strict=True) if n]


def test_rows_without_a_block_and_requests_near_their_end() -> None:
    plain, last, short = make_row(1), make_row(2, max_new_tokens=5), make_row(3, ids=(5, 6))
    plain.block = None
    assert last.block is not None
    assert short.block is not None
    short.block = DraftBlock(**(vars(short.block) | {"confidence": np.full(2, 0.9)}))
    lengths = lengths_of(((1,), (1.0,)))
    assert choose(lengths, [plain, last, short], 99) == [0, 0, 2]
    assert choose(lengths_of(explore_fraction=1.0), [last], 99) == [0]


def test_confidences_that_promise_too_much_are_not_believed_for_long() -> None:
    lengths = lengths_of()
    rows = [make_row(rid) for rid in range(16)]
    assert choose(lengths, rows, 99) == [GAMMA] * 16
    for _ in range(10):
        lengths.learn([judge(row, GAMMA, 1) for row in rows])
    assert choose(lengths, rows, 99) == [1] * 16


def test_lanes_share_what_they_learn() -> None:
    recalibrator = Recalibrator()
    one, other = lengths_of(recalibrator=recalibrator), lengths_of(recalibrator=recalibrator)
    rows = [make_row(rid) for rid in range(16)]
    for _ in range(10):
        one.learn([judge(row, GAMMA, 0) for row in rows])
    assert choose(other, rows, 99) == [0] * 16


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
    plain = choose(lengths_of(), rows, 200)
    explored = choose(lengths_of(explore_fraction=0.2), rows, 200)
    changed = [(a, b) for a, b in zip(plain, explored, strict=True) if a != b]
    assert changed
    assert all(b == GAMMA for _, b in changed)


def test_exploring_stays_within_the_step() -> None:
    rows = [make_row(rid) for rid in range(5)]
    lengths = lengths_of(STEEP, explore_fraction=1.0)
    assert choose(lengths, rows, 10) == [4, 4, 2, 0, 0]
    assert (lengths._counters.num_explored_rows, lengths._counters.num_explored) == (3, 10)
    near_end = make_row(9, anchor=5, max_new_tokens=7)
    assert choose(lengths, [near_end], 10) == [2], "the bonus ends the request"


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
        chosen = choose(lengths, rows, 64)
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


# --- policies -------------------------------------------------------------------------------------


def sampled_row(rid: int) -> LaneRequest:
    """A rejection-mode request whose drafts were drawn."""
    row = make_row(rid, sampling=make_sampling(mode="rejection", temperature=1.0))
    assert row.block is not None
    q = SparseQ(
        ids=np.tile(np.array([5, 6], np.int32), (GAMMA, 1)),
        probs=np.full((GAMMA, 2), 0.5, np.float32),
    )
    row.block = replace(row.block, q=q)
    return row


def test_baselines_verify_what_they_say_and_explore_nothing() -> None:
    rows = [make_row(rid) for rid in range(200)]
    for policy, length in [("none", 0), ("fixed:2", 2), ("full", GAMMA)]:
        lengths = lengths_of(STEEP, policy=policy, explore_fraction=1.0, live=True)
        for _ in range(100):
            assert choose(lengths, rows) == [length] * 200
        assert lengths._counters.num_explored == lengths._counters.num_explored_steps == 0
        assert lengths.verifies_drafts is (policy != "none")


def test_another_policy_counts_from_the_next_step_on() -> None:
    rows = [make_row(rid) for rid in range(16)]
    lengths = lengths_of(policy="none")
    assert choose(lengths, rows) == [0] * 16
    lengths.configure(SchedulingConfig(policy="fixed:3"))
    assert choose(lengths, rows) == [3] * 16
    with pytest.raises(ConfigError):
        lengths.configure(SchedulingConfig(policy="fixed:many"))
    assert choose(lengths, rows) == [3] * 16


def test_the_same_policy_keeps_what_it_remembers() -> None:
    lengths = lengths_of(policy="adaptive")
    before = lengths._policy
    lengths.configure(SchedulingConfig(policy="adaptive", gather="when_free"))
    assert lengths._policy is before
    lengths.configure(SchedulingConfig(policy="adaptive", min_gain=0.5))
    assert lengths._policy is not before
    lengths.configure(SchedulingConfig(policy="none"))
    lengths.configure(SchedulingConfig(policy="adaptive"))
    assert lengths._policy is before, "whoever compares two finds both as they were"
    for k in range(1, 20):
        lengths.configure(SchedulingConfig(policy=f"fixed:{k}"))
    lengths.configure(SchedulingConfig(policy="adaptive"))
    assert lengths._policy is not before, "not for ever, though"


def test_drawn_drafts_are_verified_plainly_where_the_policy_would_be_biased() -> None:
    lengths = lengths_of(policy="retrospective")
    one_hot = make_row(3, sampling=make_sampling(mode="rejection", temperature=1.0))
    coupled = make_row(4, sampling=make_sampling(mode="coupled", temperature=1.0))
    assert min(choose(lengths, [make_row(1), one_hot, coupled])) > 0
    assert lengths._counters.num_refused_steps == 0
    assert choose(lengths, [make_row(1), sampled_row(2)]) == [0, 0]
    assert lengths._counters.num_refused_steps == 1


def test_a_tier_goes_first_where_drafts_are_dear() -> None:
    dear = ((1, 16, 17, 20, 21, 100), (30.0, 30.0, 30.1, 30.2, 90.0, 200.0))
    rows = [make_row(rid, tier="interactive" if rid == 9 else "") for rid in range(16)]
    assert choose(lengths_of(dear), rows)[9] == GAMMA


def test_prompt_chunks_count_as_tokens_of_the_step() -> None:
    """Beside a chunk that fills the cheap tokens no draft pays."""
    flat_then_steep = ((1, 64, 65, 100), (1.0, 1.0, 10.0, 50.0))
    rows = [make_row(1)]
    lengths = lengths_of(flat_then_steep)
    assert lengths.choose(rows, load=load(1), room=99) == [GAMMA]
    assert lengths.choose(rows, load=load(1, num_prefill=63), room=99) == [0]
    assert lengths.choose([], load=load(0, num_prefill=63), room=99) == []
    assert lengths.choose(rows, load=load(1), room=0) == [0]


@pytest.mark.parametrize("num_prefill", [0, 16, 64])
def test_drafts_do_not_pay_for_the_prompts_beside_them(num_prefill: int) -> None:
    """Where every token costs the same, what is verified is what it is without the prompt: the
    prompt has to be computed in any case, and to stretch its step only makes it look cheap to."""
    line = ((1, 1000), (3.0, 3.0 + 999 * 0.4))
    rows = [make_row(rid) for rid in range(8)]
    lengths = lengths_of(line).choose(rows, load=load(8, num_prefill), room=900)
    tokens = 8 * (1 + np.concatenate([[0.0], np.power(0.9, np.arange(1, GAMMA + 1)).cumsum()]))
    step_s = 2.6 + 0.4 * 8 * np.arange(1, GAMMA + 2)
    best = int((tokens / step_s).argmax())
    assert 0 < best < GAMMA
    assert lengths == [best] * 8


def test_the_time_between_steps_is_charged() -> None:
    """Where it is long, drafts are cheap by comparison."""
    lengths = lengths_of(STEEP)
    rows = [make_row(1)]
    assert choose(lengths, rows) == [0]
    lengths._profile.overhead_s = 1000.0
    assert choose(lengths, rows) == [GAMMA]


def test_about_one_step_in_64_has_the_size_of_a_neighbouring_tier() -> None:
    """Of 16 rows with half their drafts paying, the next tiers are 24 and 64 tokens away."""
    table = ((16, 24, 48, 64, 65, 100), (1.0, 1.0, 1.01, 1.5, 3.0, 9.0))
    lengths = lengths_of(table, policy="adaptive", live=True)
    rows = [make_row(rid, confidence=np.full(GAMMA, 0.7)) for rid in range(16)]
    sizes = [16 + sum(choose(lengths, rows)) for _ in range(1280)]
    usual = max(set(sizes), key=sizes.count)
    explored = [size for size in sizes if size != usual]
    assert usual == 48
    assert len(explored) == lengths._counters.num_explored_steps
    assert 14 <= len(explored) <= 26
    assert set(explored) == {24, 64}
