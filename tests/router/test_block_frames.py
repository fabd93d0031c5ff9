"""Blocks that come as one frame are taken as they would be one by one."""

from __future__ import annotations

from dataclasses import replace

from router.blocks import DraftBlock, Malformed
from router.lane_request import Phase
from tests.router.lane_rig import A, B, Rig

Frame = list[DraftBlock | Malformed]


def rig_of_six() -> Rig:
    """Six requests of drafter ``a`` wait for their blocks, as the first ones did before."""
    rig = Rig()
    for rid in range(1, 7):
        rig.add(rid)
    rig.prefill(*range(1, 7))
    rig.now += 0.03
    for rid in range(1, 7):
        rig.answer(rid)
    rig.state.apply(rig.result(rig.step(lengths=2)), rig.now)
    rig.now += 0.05
    return rig


def frame_of(rig: Rig) -> Frame:
    """Good and bad ones, of requests that were asked for, and not, and are not there."""
    return [
        rig.block(1, batch_size=6, draft_s=0.02),
        rig.block(2, batch_size=6, draft_s=0.02),
        rig.block(3, batch_size=2, draft_s=0.01),
        rig.block(3, batch_size=2, draft_s=0.01),
        rig.block(4, epoch=7),
        rig.block(5, digest=7, batch_size=6, draft_s=0.02),
        replace(rig.block(6), rid=99),
        Malformed(rid=6, epoch=0, anchor=rig.state.requests[6].anchor, reason="an id too far"),
    ]


def seen(rig: Rig) -> tuple[object, ...]:
    link = rig.book.link("a")
    assert link is not None
    held = {rid: request.block is not None for rid, request in rig.state.requests.items()}
    return rig.phases(), held, rig.counters.snapshot(), link.snapshot(), link.latency_s(9)


def test_a_frame_is_its_blocks() -> None:
    together, single = rig_of_six(), rig_of_six()
    together.state.take_blocks("a", frame_of(together), together.now)
    for block in frame_of(single):
        single.state.take_block("a", block, single.now)
    assert seen(together) == seen(single)
    phases, held, counters, *_ = seen(together)
    assert held == {1: True, 2: True, 3: True, 4: False, 5: False, 6: False}
    assert phases == dict.fromkeys(range(1, 7), Phase.READY) | {4: Phase.AWAITING}
    assert isinstance(counters, dict)
    reasons = ("unasked", "epoch", "digest", "unknown")
    assert [counters[f"stale.{reason}"] for reason in reasons] == [1, 1, 1, 1]
    assert counters["num_malformed"] == 1


def test_a_frame_of_a_drafter_that_is_gone_or_another_ones_is_of_no_use() -> None:
    rig = Rig(drafters=(A, B))
    rig.add(1)
    rig.prefill(1)
    mine = rig.state.requests[1].drafter
    assert mine is not None
    other = {A.drafter_id: B, B.drafter_id: A}[mine.drafter_id]
    rig.state.take_blocks(other.drafter_id, [rig.block(1)], rig.now)
    rig.book.down(other.drafter_id)
    rig.state.take_blocks(other.drafter_id, [rig.block(1)], rig.now)
    assert rig.counters.stale["drafter"] == 2
    rig.state.take_blocks(mine.drafter_id, [], rig.now)
    assert rig.phases() == {1: Phase.AWAITING}
