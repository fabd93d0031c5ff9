"""The queue in front of the drafter: order, bounds, and what a batch takes."""

from __future__ import annotations

import asyncio

import pytest

from drafter_service.drafter import HangUp, Work
from drafter_service.work_queue import WorkQueue, frame_bytes
from tests.drafters import Feed, make_spec


def commits(*sizes: int) -> list[Work]:
    feed = Feed(0, make_spec())
    return [feed.commit(size) for size in sizes]


async def test_a_batch_is_everything_in_order_with_the_oldest_time() -> None:
    queue = WorkQueue(max_bytes=1 << 20, max_rows=100)
    assert not await queue.wait(0.001)
    work = [Feed(0, make_spec()).open(), *commits(3, 4)]
    for now, item in enumerate(work):
        await queue.put(item, 5.0 + now)
    assert await queue.wait(0.001)
    batch = await queue.take(9.0)
    assert list(batch.work) == work
    assert batch.oldest_s == 5.0
    assert len(queue) == queue.num_bytes == 0
    assert not await queue.wait(0.001)
    empty = await queue.take(9.0)
    assert (empty.work, empty.oldest_s) == ((), 9.0)


async def test_batches_are_cut_by_rows_but_one_frame_always_fits() -> None:
    queue = WorkQueue(max_bytes=1 << 20, max_rows=10)
    for item in commits(25, 6, 4, 1):
        await queue.put(item, 0.0)
    sizes = []
    while len(queue):
        assert await queue.wait(0.001)
        batch = await queue.take(0.0)
        sizes.append([frame_bytes(w) for w in batch.work])
    assert [len(s) for s in sizes] == [1, 2, 1]


async def test_a_full_queue_makes_the_producer_wait() -> None:
    first, second, third = commits(8, 8, 8)
    queue = WorkQueue(max_bytes=2 * frame_bytes(first) + 256, max_rows=1)
    await queue.put(first, 0.0)
    await queue.put(second, 0.0)
    assert queue.num_bytes == 2 * frame_bytes(first)
    waiting = asyncio.create_task(queue.put(third, 0.0))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    assert queue.num_bytes == 2 * frame_bytes(first)
    queue.put_now(Work(owner=1, frame=HangUp()), 0.0)  # a last word does not wait
    assert (await queue.take(0.0)).work == (first,)
    await asyncio.wait_for(waiting, 5.0)
    batch = await queue.take(0.0)
    assert batch.work[0] == second
    assert isinstance(batch.work[1].frame, HangUp)


async def test_a_cancelled_producer_leaves_nothing_behind() -> None:
    first, second = commits(8, 8)
    queue = WorkQueue(max_bytes=frame_bytes(first), max_rows=100)
    await queue.put(first, 0.0)
    waiting = asyncio.create_task(queue.put(second, 0.0))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await queue.take(0.0)).work == (first,)
    assert len(queue) == 0


async def test_a_frame_larger_than_the_bound_passes_alone() -> None:
    (huge,) = commits(64)
    queue = WorkQueue(max_bytes=10, max_rows=1)
    await asyncio.wait_for(queue.put(huge, 0.0), 5.0)
    assert (await queue.take(0.0)).work == (huge,)
