"""How many of the queued requests go with one step."""

from __future__ import annotations

from cluster.constraints import MAX_CONSTRAINT_BYTES
from cluster.wire import MAX_FRAME_BYTES, decode, encode
from router.departures import first_batch
from router.lane_request import LaneRequest
from tests.frames import make_sampling
from tests.router.lane_rig import Rig

LONGEST = "x" * MAX_CONSTRAINT_BYTES


def bound(rid: int, num_chars: int) -> LaneRequest:
    return LaneRequest(
        rid=rid,
        ids=[1],
        num_prompt=1,
        max_new_tokens=4,
        stop_ids=(),
        sampling=make_sampling(),
        draft=False,
        constraint_kind="regex",
        constraint="x" * num_chars,
    )


def test_plain_requests_all_go_at_once() -> None:
    queued = [bound(rid, 0) for rid in range(5000)]
    assert first_batch(queued) == queued
    assert first_batch([]) == []


def test_the_first_one_goes_however_long_it_is_and_order_is_kept() -> None:
    queued = [bound(0, MAX_FRAME_BYTES), bound(1, 0), bound(2, 1)]
    assert first_batch(queued) == queued[:1]
    assert first_batch(queued[1:]) == queued[1:]


def test_a_thousand_of_the_longest_constraints_go_in_several_frames() -> None:
    """In one they would make more than a frame may hold, which ends the lane."""
    num_requests = 1100
    assert num_requests * MAX_CONSTRAINT_BYTES > MAX_FRAME_BYTES
    rig = Rig(max_requests=2000, kv_blocks=4000, max_step_tokens=8192)
    for rid in range(1, num_requests + 1):
        rig.add(rid, draft=False, constraint_kind="regex", constraint=LONGEST)
    admitted: list[int] = []
    while len(admitted) < num_requests:
        assert rig.state.next_step_at(rig.now) <= rig.now, "those left over are not waited for"
        step = rig.step()
        assert decode(encode(step)) == step
        rids = [admission.rid for admission in step.admissions]
        assert rids
        admitted += rids
        # Those of the step before decode on: their first token ends the prefill.
        rig.state.apply(rig.result(step, prefilled=tuple(rids)), rig.now)
    assert admitted == list(range(1, num_requests + 1))
