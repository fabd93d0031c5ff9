"""What the roster counts is what a look at all requests would find."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np

from router.blocks import DraftBlock
from router.drafter_book import DrafterRef
from router.lane_request import LaneRequest, Phase
from router.roster import Latency, Roster
from tests.frames import make_sampling

LATENCY = {"a": Latency(0.01, 0.001), "b": Latency(0.03, 0.002)}


def make_request(rid: int, **changes: Any) -> LaneRequest:
    values: dict[str, Any] = {
        "rid": rid,
        "ids": list(range(1 + rid % 5)),
        "num_prompt": 1 + rid % 5,
        "max_new_tokens": 10 + rid,
        "stop_ids": (),
        "sampling": make_sampling(),
        "draft": True,
        "drafter": DrafterRef(drafter_id="ab"[rid % 2], address="", fingerprint="f"),
    }
    return LaneRequest(**(values | changes))


def make_block(rid: int) -> DraftBlock:
    return DraftBlock(rid=rid, epoch=0, anchor=0, digest=0, ids=(1,), confidence=np.ones(1), q=None)


def check(roster: Roster, everybody: dict[int, LaneRequest]) -> None:
    assert dict(roster.requests) == everybody
    for phase in Phase:
        expected = {rid for rid, r in everybody.items() if r.phase is phase}
        assert roster.within(phase).keys() == expected
    ready = [r for r in everybody.values() if r.phase is Phase.READY]
    awaiting = [r for r in everybody.values() if r.phase is Phase.AWAITING]
    queued = [r for r in everybody.values() if r.phase is Phase.QUEUED]
    assert roster.num_ready == len(ready)
    assert roster.num_ready_blocks == sum(r.block is not None for r in ready)
    assert roster.num_awaiting == len(awaiting)
    assert sum(wave.num_rows for wave in roster.waves) == len(awaiting)
    assert roster.first_due() == min((r.due for r in awaiting), default=math.inf)
    assert roster.num_queued_tokens == sum(len(r.ids) for r in queued)
    assert roster.kv_blocks == sum(-(-r.max_len // 8) for r in everybody.values())


def test_counts_follow_every_change() -> None:
    rng = random.Random(3)
    roster = Roster(kv_block_tokens=8, latency=LATENCY.__getitem__)
    everybody: dict[int, LaneRequest] = {}
    now = 0.0
    for rid in range(600):
        now += rng.choice([0.0, 0.001])
        if rng.random() < 0.1 or not everybody:
            everybody[rid] = make_request(rid)
            roster.add(everybody[rid], now)
        request = rng.choice(list(everybody.values()))
        move = rng.random()
        if move < 0.03:
            assert roster.remove(request.rid) is request
            del everybody[request.rid]
            request.enter(Phase.READY, now)  # nobody minds any more
        elif move < 0.4 and request.phase is not Phase.AWAITING:
            request.due = now + 0.05
            request.enter(Phase.AWAITING, now)
        else:
            phase = rng.choice([Phase.PREFILLING, Phase.READY, Phase.IN_STEP])
            request.block = make_block(request.rid) if rng.random() < 0.5 else None
            request.enter(phase, now)
        check(roster, everybody)
    assert roster.remove(99999) is None


def test_a_wave_is_what_one_step_asked_one_drafter_for() -> None:
    roster = Roster(kv_block_tokens=8, latency=LATENCY.__getitem__)
    for rid in range(6):
        request = make_request(rid, due=1.0 + rid)
        roster.add(request, 0.0)
        request.enter(Phase.AWAITING, 0.1 if rid < 4 else 0.2)
    found = [(w.expected, w.deviation_s, w.num_rows, w.due) for w in roster.waves]
    assert found == [
        (0.1 + 0.01, 0.001, 2, 1.0),
        (0.1 + 0.03, 0.002, 2, 2.0),
        (0.2 + 0.01, 0.001, 1, 5.0),
        (0.2 + 0.03, 0.002, 1, 6.0),
    ]


def test_a_wave_has_one_deadline_whoever_leaves_it() -> None:
    roster = Roster(kv_block_tokens=8, latency=LATENCY.__getitem__)
    first, second = make_request(2, due=1.0), make_request(4, due=3.0)
    for request in (first, second):
        roster.add(request, 0.0)
        request.enter(Phase.AWAITING, 0.1)
    assert (first.due, second.due) == (1.0, 1.0)
    first.enter(Phase.READY, 1.0)
    assert roster.first_due() == second.due
