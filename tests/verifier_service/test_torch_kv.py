"""Blocks are never lent twice, never lost, and come in one run where one is free."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verifier_service.torch_engine.kv import BlockAllocator, KVCache, Reservation

NUM_BLOCKS = 24


def free_by_hand(held: list[Reservation]) -> list[int]:
    lent = {block for reservation in held for block in reservation.blocks}
    return [block for block in range(NUM_BLOCKS) if block not in lent]


def longest_run(blocks: list[int]) -> int:
    best = run = 0
    for index, block in enumerate(blocks):
        run = run + 1 if index and blocks[index - 1] == block - 1 else 1
        best = max(best, run)
    return best


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9 * 4)), max_size=120))
def test_blocks_are_lent_once_and_return(moves: list[tuple[bool, int]]) -> None:
    allocator = BlockAllocator(num_blocks=NUM_BLOCKS, block_tokens=4)
    held: list[Reservation] = []
    for reserve, number in moves:
        if reserve:
            free = free_by_hand(held)
            got = allocator.reserve(number)
            wanted = -(-number // 4)
            assert (got is None) == (wanted > len(free))
            if got is not None:
                assert len(got.blocks) == wanted
                assert got.capacity >= number
                assert set(got.blocks) <= set(free)
                assert got.is_contiguous == (longest_run(free) >= wanted)
                held.append(got)
        elif held:
            allocator.release(held.pop(number % len(held)))
        assert allocator.free_blocks == len(free_by_hand(held))
    for reservation in held:
        allocator.release(reservation)
    whole = allocator.reserve(NUM_BLOCKS * 4)
    assert whole is not None
    assert whole.blocks == tuple(range(NUM_BLOCKS))


def test_double_release_is_caught() -> None:
    allocator = BlockAllocator(num_blocks=4, block_tokens=4)
    reservation = allocator.reserve(8)
    assert reservation is not None
    allocator.release(reservation)
    with pytest.raises(AssertionError, match="twice"):
        allocator.release(reservation)


def test_slots_follow_the_block_table() -> None:
    scattered = Reservation(blocks=(5, 1, 2), block_tokens=4)
    assert not scattered.is_contiguous
    assert scattered.slots(2, 7) == [22, 23, 4, 5, 6, 7, 8]
    run = Reservation(blocks=(3, 4), block_tokens=4)
    assert run.slots(2, 4) == [14, 15, 16, 17]


def test_falling_blocks_are_not_a_run() -> None:
    assert not Reservation(blocks=(2, 1), block_tokens=4).is_contiguous


def test_clear_zeroes_only_the_slots_given() -> None:
    cache = KVCache(
        num_layers=2,
        num_slots=4,
        num_kv_heads=1,
        head_dim=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    ones = torch.ones(4, 1, 2)
    for layer in range(2):
        cache.write(layer, torch.arange(4), ones, ones)
    cache.clear([1, 3])
    for tensor in (*cache.keys, *cache.values):
        assert tensor[0, :, 0].tolist() == [1, 0, 1, 0]
