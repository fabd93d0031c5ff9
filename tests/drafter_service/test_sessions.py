"""What a session table lets pass, what it loses, and why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cluster import digest
from cluster.wire import Open
from drafter_service.draft_kv import BLOCK_POSITIONS, BlockAllocator
from drafter_service.sessions import DraftSession, SessionTable
from tests.frames import make_sampling

LANE = "router-0"


def make_table(**changes: Any) -> SessionTable:
    bounds = {"max_sessions": 4, "max_tokens": 512, "max_positions": 400, "idle_s": 10.0}
    return SessionTable(**{**bounds, **changes})


def opening(rid: int, *, epoch: int = 0, first_id: int = 5) -> Open:
    return Open(lane_id=LANE, rid=rid, epoch=epoch, first_id=first_id, sampling=make_sampling())


def commit(
    table: SessionTable, rid: int, ids: list[int], num_new: int, **changes: Any
) -> DraftSession | None:
    """Commit the last ``num_new`` of all ``ids`` so far."""
    arguments = {
        "key": (LANE, rid),
        "epoch": 0,
        "owner": 1,
        "first_position": len(ids) - 1 - num_new,
        "ids": ids[len(ids) - num_new :],
        "digest_after": digest.of(ids),
        "now_s": 0.0,
    }
    return table.commit(**{**arguments, **changes})


def test_contiguous_commits_advance_the_session() -> None:
    table = make_table()
    assert table.open(opening(1), 1, 0.0) is not None
    session = commit(table, 1, [5, 6, 7, 8], 3)
    assert session is not None
    assert (session.covered, session.last_id) == (3, 8)
    session = commit(table, 1, [5, 6, 7, 8, 9], 1)
    assert session is not None
    assert (session.covered, session.last_id, session.digest) == (4, 9, digest.of([5, 6, 7, 8, 9]))
    assert table.take_lost() == ()


@pytest.mark.parametrize("first_position", [2, 4, 0])
def test_a_gap_or_an_overlap_loses_the_session(first_position: int) -> None:
    table = make_table()
    table.open(opening(1), 1, 0.0)
    commit(table, 1, [5, 6, 7, 8], 3)
    assert commit(table, 1, [5, 6, 7, 8, 9], 1, first_position=first_position) is None
    (lost,) = table.take_lost()
    assert (lost.lane_id, lost.rid, lost.epoch, lost.owner) == (LANE, 1, 0, 1)
    assert f"starts at {first_position}, session covers 3" in lost.reason
    assert len(table) == 0
    assert table.counters.gaps == 1
    assert table.allocator.num_free == 512 // BLOCK_POSITIONS


def test_another_prefix_loses_the_session() -> None:
    table = make_table()
    table.open(opening(1, first_id=4), 1, 0.0)
    assert commit(table, 1, [5, 6], 1) is None
    assert "digest differs" in table.take_lost()[0].reason
    assert table.counters.diverged == 1


def test_old_epochs_are_dropped_and_counted() -> None:
    table = make_table()
    table.open(opening(1, epoch=3), 1, 0.0)
    assert commit(table, 1, [5, 6], 1, epoch=2) is None
    assert table.open(opening(1, epoch=3), 1, 0.0) is None
    assert table.open(opening(1, epoch=2), 2, 0.0) is None
    assert table.counters.stale == 3
    assert table.take_lost() == ()
    session = commit(table, 1, [5, 6], 1, epoch=3)
    assert session is not None
    assert session.covered == 1


def test_a_higher_epoch_replaces_silently() -> None:
    table = make_table()
    table.open(opening(1), 1, 0.0)
    commit(table, 1, [5, 6, 7], 2)
    table.open(opening(1, epoch=1), 2, 0.0)
    assert table.take_lost() == ()
    assert commit(table, 1, [5, 6, 7], 2, epoch=0, owner=1) is None
    assert table.counters.stale == 1
    session = commit(table, 1, [5, 6], 1, epoch=1, owner=2)
    assert session is not None
    assert session.covered == 1


@pytest.mark.parametrize("changes", [{"key": (LANE, 9)}, {"epoch": 1}, {"owner": 2}])
def test_a_commit_of_no_session_is_told_so(changes: dict[str, Any]) -> None:
    table = make_table()
    table.open(opening(1), 1, 0.0)
    assert commit(table, 1, [5, 6], 1, **changes) is None
    (lost,) = table.take_lost()
    assert lost.reason == "no such session"
    assert lost.owner == changes.get("owner", 1)
    assert table.counters.unknown == 1
    assert len(table) == 1  # the session of somebody else is untouched


def test_idle_sessions_expire_oldest_first() -> None:
    table = make_table()
    for rid, now in ((1, 0.0), (2, 4.0)):
        table.open(opening(rid), 1, now)
    commit(table, 1, [5, 6], 1, now_s=8.0)
    table.expire(13.9)
    assert table.take_lost() == ()
    table.expire(14.1)
    assert [lost.rid for lost in table.take_lost()] == [2]
    table.expire(18.1)
    assert [lost.rid for lost in table.take_lost()] == [1]
    assert table.counters.expired == 2


def test_the_least_recently_used_makes_room() -> None:
    table = make_table(max_sessions=2)
    table.open(opening(1), 1, 0.0)
    table.open(opening(2), 1, 1.0)
    commit(table, 1, [5, 6], 1, now_s=2.0)
    assert table.open(opening(3), 1, 4.0) is not None
    assert [lost.rid for lost in table.take_lost()] == [2]
    assert table.counters.evicted == 1


def test_busy_sessions_are_not_evicted_for_newcomers() -> None:
    table = make_table(max_sessions=2)
    for rid in (1, 2):
        table.open(opening(rid), 1, 0.0)
    assert table.open(opening(3), 1, 0.5) is None
    (lost,) = table.take_lost()
    assert lost.rid == 3
    assert "no room" in lost.reason
    assert len(table) == 2
    assert table.counters.full == 1


def test_kv_is_bounded_over_all_sessions() -> None:
    table = make_table(max_tokens=4 * BLOCK_POSITIONS)
    ids = list(range(3 * BLOCK_POSITIONS + 1))
    for rid in (1, 2):
        table.open(opening(rid, first_id=0), 1, 0.0)
    assert commit(table, 1, ids, len(ids) - 1) is not None
    assert table.allocator.num_free == 1
    assert commit(table, 2, ids, len(ids) - 1, now_s=0.5) is None
    assert [lost.rid for lost in table.take_lost()] == [2]
    assert table.allocator.num_free == 1
    table.open(opening(3, first_id=0), 1, 5.0)
    assert commit(table, 3, ids, len(ids) - 1, now_s=5.0) is not None  # evicts the idle 1
    assert [lost.rid for lost in table.take_lost()] == [1]


def test_a_context_past_the_drafters_limit_is_lost() -> None:
    table = make_table(max_positions=3)
    table.open(opening(1), 1, 0.0)
    assert commit(table, 1, [5, 6, 7, 8], 3) is not None
    assert commit(table, 1, [5, 6, 7, 8, 9], 1) is None
    assert "context of 4 exceeds 3" in table.take_lost()[0].reason


def test_release_and_hang_up_are_silent_and_free_everything() -> None:
    table = make_table()
    for rid, owner in ((1, 1), (2, 1), (3, 2)):
        table.open(opening(rid), owner, 0.0)
        commit(table, rid, [5, 6], 1, owner=owner)
    table.release(LANE, [1, 3, 77], 1)
    assert len(table) == 2  # 3 belongs to another stream
    table.hang_up(1)
    assert table.get(LANE, 3) is not None
    assert len(table) == 1
    table.hang_up(2)
    assert table.take_lost() == ()
    assert table.allocator.num_free == 512 // BLOCK_POSITIONS


def test_trimmed_positions_free_their_blocks_and_slots_stay_right() -> None:
    table = make_table()
    table.open(opening(1, first_id=0), 1, 0.0)
    ids = list(range(101))
    session = commit(table, 1, ids, 100)
    assert session is not None
    before = session.slots(64, 100)
    table.trim(session, 70)
    assert session.first_block == 2
    assert table.allocator.num_free == 512 // BLOCK_POSITIONS - 2
    assert np.array_equal(session.slots(64, 100), before)
    table.trim(session, 10)
    assert session.first_block == 2
    session = commit(table, 1, [*ids, *range(200, 260)], 60)
    assert session is not None
    assert len(np.unique(session.slots(64, 160))) == 96


def test_allocator_never_gives_out_the_padding_block_or_one_block_twice() -> None:
    allocator = BlockAllocator(8)
    first = allocator.take(5)
    allocator.give_back(first[1:3])
    second = allocator.take(5)
    assert sorted([first[0], *first[3:], *second]) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert allocator.num_free == 0
