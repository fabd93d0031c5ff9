"""The bounded queue behind streams and links."""

from __future__ import annotations

import asyncio

import pytest

from cluster.byte_queue import ByteQueue, QueueClosed


async def test_first_in_first_out_and_bounds() -> None:
    queue: ByteQueue[str] = ByteQueue(max_items=3, max_bytes=10)
    assert queue.try_put("a", 4)
    assert queue.try_put("b", 6)
    assert not queue.try_put("c", 1)  # bytes
    assert await queue.get() == "a"
    assert queue.try_put("c", 0)
    assert queue.try_put("d", 0)
    assert not queue.try_put("e", 0)  # items
    assert queue.num_bytes == 6
    assert [await queue.get() for _ in range(3)] == ["b", "c", "d"]
    assert queue.num_bytes == 0


async def test_an_item_over_the_bound_passes_alone() -> None:
    queue: ByteQueue[str] = ByteQueue(max_items=3, max_bytes=10)
    assert queue.try_put("big", 11)
    assert not queue.try_put("small", 0)
    assert await queue.get() == "big"


async def test_put_waits_for_room() -> None:
    queue: ByteQueue[int] = ByteQueue(max_items=1, max_bytes=10)
    order: list[int] = []

    async def produce() -> None:
        for i in range(5):
            await queue.put(i, 1)
            order.append(i)

    producer = asyncio.create_task(produce())
    await asyncio.sleep(0)
    assert order == [0]
    assert [await queue.get() for _ in range(5)] == [0, 1, 2, 3, 4]
    await producer


async def test_close_drains_then_ends() -> None:
    queue: ByteQueue[int] = ByteQueue(max_items=1, max_bytes=10)
    await queue.put(1, 1)
    blocked = asyncio.create_task(queue.put(2, 1))
    await asyncio.sleep(0)
    queue.close()
    with pytest.raises(QueueClosed):
        await blocked
    assert await queue.get() == 1
    with pytest.raises(QueueClosed):
        await queue.get()
    with pytest.raises(QueueClosed):
        queue.try_put(3, 1)


async def test_close_wakes_a_waiting_consumer_and_discards() -> None:
    queue: ByteQueue[int] = ByteQueue(max_items=2, max_bytes=10)
    consumer = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.close()
    with pytest.raises(QueueClosed):
        await consumer
    other: ByteQueue[int] = ByteQueue(max_items=2, max_bytes=10)
    await other.put(1, 5)
    other.close(discard=True)
    assert other.num_bytes == 0
    with pytest.raises(QueueClosed):
        await other.get()
