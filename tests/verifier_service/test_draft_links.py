"""Draft sessions over real streams: told everything in order, or reported unbound; never a wait."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

from cluster import digest
from cluster.wire import MAX_COMMIT_BYTES, Commit, Frame
from tests.fakes import FakeDrafter, fake_features, make_hello, make_sampling
from tests.waiting import eventually
from verifier_service.draft_link import DraftLink
from verifier_service.draft_links import DraftLinks, Update
from verifier_service.feature_cache import Chunk

LANE = "router-0"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def drafter() -> AsyncIterator[FakeDrafter]:
    drafter = FakeDrafter()
    await drafter.start()
    yield drafter
    await drafter.stop()


@contextlib.asynccontextmanager
async def make_links(**changes: Any) -> AsyncIterator[DraftLinks]:
    options: dict[str, Any] = {
        "hello": make_hello("verifier", "verifier-0"),
        "queue_bytes": 32 << 20,
        "connect_timeout_s": 5.0,
    }
    links = DraftLinks(**(options | changes))
    yield links
    await links.close()
    names = {task.get_name() for task in asyncio.all_tasks()}
    assert not {name for name in names if "drafter-" in name}, names


def bind(
    links: DraftLinks, drafter: FakeDrafter, rid: int, ids: Sequence[int], **changes: Any
) -> None:
    options: dict[str, Any] = {
        "rid": rid,
        "lane_id": LANE,
        "epoch": 1,
        "drafter_id": drafter.member_id,
        "address": drafter.address,
        "first_id": ids[0],
        "sampling": make_sampling(),
    }
    links.open(**(options | changes))


def update(rid: int, ids: Sequence[int], first: int, end: int, **changes: Any) -> Update:
    """Rows first..end-1 of a request whose ids are ``ids``."""
    chunk = Chunk(
        first_position=first,
        ids=np.array(ids[first + 1 : end + 1], np.int32),
        features=fake_features(ids, first, end).numpy(),
    )
    prefix = digest.of(ids[: end + 1])
    return Update(rid=rid, chunk=chunk, digest=prefix, want_draft=changes.get("want_draft", False))


def told(drafter: FakeDrafter, rid: int) -> list[int]:
    session = drafter.sessions.get((LANE, rid))
    return session.ids if session else []


async def test_sessions_are_told_everything_in_few_frames(drafter: FakeDrafter) -> None:
    texts = {rid: [rid, *range(10, 20)] for rid in range(5)}
    async with make_links() as links:
        for rid, ids in texts.items():
            bind(links, drafter, rid, ids)
        for first, end in [(0, 4), (4, 5), (5, 10)]:
            links.commit(update(rid, ids, first, end) for rid, ids in texts.items())
        assert links.counters.commit_frames == 3  # one per step, not one per session
        assert links.counters.committed_rows == 50
        await eventually(lambda: all(told(drafter, rid) == ids for rid, ids in texts.items()))
        assert drafter.faults == []
        links.release([0, 1, 99])
        await eventually(lambda: len(drafter.sessions) == 3)
        links.release_all()
        await eventually(lambda: not drafter.sessions)
        assert links.take_unbound() == frozenset()


async def test_long_commits_are_cut_and_every_piece_checks(drafter: FakeDrafter) -> None:
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 97, 120_000).tolist()
    async with make_links() as links:
        bind(links, drafter, 1, ids)
        whole = update(1, ids, 0, len(ids) - 1)
        assert whole.chunk.num_bytes > MAX_COMMIT_BYTES
        links.commit([whole])
        assert links.counters.commit_frames == 2
        assert links.queued_bytes < 2 * MAX_COMMIT_BYTES
        await eventually(lambda: told(drafter, 1) == ids)
        assert drafter.faults == []


async def test_only_the_last_piece_asks_for_a_draft(
    drafter: FakeDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits: list[Commit] = []
    post = DraftLink.post

    def record(self: DraftLink, frame: Frame, num_bytes: int) -> bool:
        if isinstance(frame, Commit):
            commits.append(frame)
        return post(self, frame, num_bytes)

    monkeypatch.setattr(DraftLink, "post", record)
    ids = (np.arange(120_000) % 97).tolist()
    async with make_links() as links:
        bind(links, drafter, 1, ids)
        links.commit([update(1, ids, 0, len(ids) - 1, want_draft=True)])
    assert [frame.want_draft.tolist() for frame in commits] == [[0], [1]]


async def test_an_unreachable_drafter_unbinds_and_costs_no_wait() -> None:
    async with make_links() as links:
        ghost = FakeDrafter(member_id="drafter-9")
        bind(links, ghost, 1, [5], address="127.0.0.1:1")
        assert links.bound(1)
        links.commit([update(1, [5, 6], 0, 1)])  # queued while dialling
        await eventually(lambda: not links.bound(1))
        assert links.take_unbound() == {1}
        assert links.take_unbound() == frozenset()
        links.commit([update(1, [5, 6, 7], 1, 2)])  # an unbound one is skipped
        assert links.queued_bytes == 0


async def test_a_failed_drafter_is_not_redialled_at_once(drafter: FakeDrafter) -> None:
    clock = Clock()
    async with make_links(clock=clock) as links:
        bind(links, drafter, 1, [5], drafter_id="somebody else")  # the check of the id fails it
        await eventually(lambda: links.counters.links_failed == 1)
        assert links.take_unbound() == {1}
        bind(links, drafter, 1, [5])
        assert links.take_unbound() == {1}
        assert not links.bound(1)
        clock.now = 2.0
        bind(links, drafter, 1, [5])
        await eventually(lambda: told(drafter, 1) == [5])


async def test_a_drafter_of_another_checkpoint_is_not_fed() -> None:
    drafter = FakeDrafter(drafter="other")
    await drafter.start()
    hello = make_hello("verifier", "verifier-0", drafter="mine")
    async with make_links(hello=hello) as links:
        bind(links, drafter, 1, [5])
        await eventually(lambda: links.take_unbound() == {1})
        assert drafter.sessions == {}
    await drafter.stop()


async def test_a_stuck_drafter_costs_bounded_memory_and_only_its_sessions(
    drafter: FakeDrafter,
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))  # the kernel connects, nobody answers
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    stuck = FakeDrafter(member_id="drafter-7")
    long, short = [1, *([2] * 2000)], [3, 4, 5]
    async with make_links(queue_bytes=20_000) as links:
        bind(links, stuck, 1, long, address=address)
        bind(links, stuck, 2, short, address=address)
        bind(links, drafter, 3, short)
        for first in range(0, 2000, 500):  # 6 kB each
            links.commit([update(1, long, first, first + 500)])
            assert links.queued_bytes <= 20_000
        assert links.take_unbound() == {1}
        assert links.counters.overflowed == 1
        assert links.bound(2)  # its frames found room
        links.commit([update(3, short, 0, 2)])
        await eventually(lambda: told(drafter, 3) == short)
    listener.close()


async def test_a_dying_drafter_unbinds_its_sessions_and_no_other(drafter: FakeDrafter) -> None:
    other = FakeDrafter(member_id="drafter-1")
    await other.start()
    async with make_links() as links:
        bind(links, drafter, 1, [5])
        bind(links, drafter, 2, [6])
        bind(links, other, 3, [7])
        await eventually(lambda: drafter.num_opens == 2 and other.num_opens == 1)
        await drafter.stop()
        await eventually(lambda: links.counters.links_failed == 1)
        assert links.take_unbound() == {1, 2}
        links.commit([update(3, [7, 8], 0, 1)])
        await eventually(lambda: told(other, 3) == [7, 8])
        # The first one moves over, told everything again.
        bind(links, other, 1, [5], epoch=2)
        links.commit([update(1, [5, 6, 7], 0, 2)])
        await eventually(lambda: told(other, 1) == [5, 6, 7])
        assert other.faults == []
    await other.stop()


async def test_a_lost_session_is_unbound_unless_it_was_replaced(drafter: FakeDrafter) -> None:
    async with make_links() as links:
        bind(links, drafter, 1, [5])
        bind(links, drafter, 2, [6])
        await eventually(lambda: drafter.num_opens == 2)
        # A hole, seen by the drafter: it answers Lost on our stream.
        drafter.sessions[LANE, 1].ids.append(0)
        links.commit([update(1, [5, 6], 0, 1)])
        await eventually(lambda: links.counters.lost == 1)
        assert links.take_unbound() == {1}
        # The same for a session that was opened anew in the meantime: its epoch protects it.
        drafter.sessions[LANE, 2].ids.append(0)
        links.commit([update(2, [6, 7], 0, 1)])
        bind(links, drafter, 2, [6], epoch=2)
        links.commit([update(2, [6, 7], 0, 1)])
        await eventually(lambda: told(drafter, 2) == [6, 7])
        assert links.counters.lost == 1
        assert links.take_unbound() == frozenset()
        assert links.bound(2)


async def test_a_hole_is_never_sent(drafter: FakeDrafter) -> None:
    ids = [5, 6, 7, 8]
    async with make_links() as links:
        bind(links, drafter, 1, ids)
        links.commit([update(1, ids, 0, 1)])
        links.commit([update(1, ids, 2, 3)])
        assert links.take_unbound() == {1}
        await eventually(lambda: drafter.num_opens == 1 and not drafter.sessions)
        assert drafter.faults == []


async def test_sessions_without_features_commit_ids_alone(drafter: FakeDrafter) -> None:
    async with make_links() as links:
        bind(links, drafter, 1, [5])
        bind(links, drafter, 2, [6])
        bare = [
            Update(
                rid=rid,
                chunk=Chunk(
                    first_position=0,
                    ids=np.array([9], np.int32),
                    features=np.zeros((0, 0), np.float32),
                ),
                digest=digest.of([first, 9]),
                want_draft=False,
            )
            for rid, first in [(1, 5), (2, 6)]
        ]
        links.commit(bare)
        await eventually(lambda: told(drafter, 1) == [5, 9] and told(drafter, 2) == [6, 9])
        assert drafter.faults == []
