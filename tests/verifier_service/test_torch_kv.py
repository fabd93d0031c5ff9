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


def test_scattered_blocks_that_span_their_number_are_not_a_run() -> None:
    """A run taken for one that it is not would have a request read what belongs to another."""
    allocator = BlockAllocator(num_blocks=8, block_tokens=4)
    held = [allocator.reserve(4) for _ in range(8)]
    for block in (4, 5, 2, 7):
        reservation = held[block]
        assert reservation is not None
        allocator.release(reservation)
    scattered = allocator.reserve(16)
    assert scattered is not None
    assert sorted(scattered.blocks) == [2, 4, 5, 7]
    assert scattered.blocks[-1] - scattered.blocks[0] == 3
    assert not scattered.is_contiguous
    assert scattered.slots(0, 16) == [4 * b + i for b in scattered.blocks for i in range(4)]


def whole(allocator: BlockAllocator, num_blocks: int, name: bytes) -> list[bytes]:
    """Lend blocks, fill them and give them back. Returns their hashes."""
    reservation = allocator.reserve(num_blocks * allocator.block_tokens)
    assert reservation is not None
    hashes = [name + bytes([place]) for place in range(num_blocks)]
    for block, block_hash in zip(reservation.blocks, hashes, strict=True):
        allocator.index.put(block, block_hash)
    allocator.index.touch(hashes)
    allocator.release(reservation)
    return hashes


def test_runs_that_cost_least_are_lent_first() -> None:
    allocator = BlockAllocator(num_blocks=10, block_tokens=4)
    a, b, c = (whole(allocator, num, name) for num, name in ((3, b"a"), (3, b"b"), (2, b"c")))
    find = allocator.index.find
    assert [find(a), find(b), find(c)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    first = allocator.reserve(8)
    assert first is not None
    assert first.blocks == (8, 9), "nobody's"
    allocator.index.touch(a)
    second = allocator.reserve(8)
    assert second is not None
    assert second.blocks == (4, 5), "the least recently used's tail"
    assert [find(a), find(b), find(c)] == [[0, 1, 2], [3], [6, 7]]
    third = allocator.reserve(8)
    assert third is not None
    assert third.blocks == (6, 7), "the least recently used by now"
    assert allocator.free_blocks == 4


@given(
    st.lists(st.tuples(st.sampled_from(["lend", "keep", "return"]), st.integers(1, 9)), max_size=80)
)
def test_what_is_found_was_not_lent_since(moves: list[tuple[str, int]]) -> None:
    """And a run is never found wanting because what is kept lies in its way."""
    allocator = BlockAllocator(num_blocks=NUM_BLOCKS, block_tokens=1)
    held: list[Reservation] = []
    kept: dict[bytes, int] = {}
    for move, number in moves:
        if move == "lend":
            free = free_by_hand(held)
            got = allocator.reserve(number)
            assert (got is None) == (number > len(free))
            if got is not None:
                assert got.is_contiguous == (longest_run(free) >= number)
                kept = {name: block for name, block in kept.items() if block not in got.blocks}
                held.append(got)
        elif move == "keep" and held:
            for block in held[number % len(held)].blocks[:2]:
                name = bytes([block])
                allocator.index.put(block, name)
                kept[name] = block
        elif held:
            allocator.release(held.pop(number % len(held)))
        for block in range(NUM_BLOCKS):
            name = bytes([block])
            assert allocator.index.find([name]) == ([kept[name]] if name in kept else [])
            assert allocator.is_free(block) == (block in free_by_hand(held))


@pytest.mark.parametrize(
    ("sources", "targets"), [([0, 1], [3, 4]), ([1, 2], [0, 1]), ([2, 4, 3], [3, 2, 5])]
)
def test_copies_may_overlap(sources: list[int], targets: list[int]) -> None:
    cache = KVCache(
        num_layers=2,
        num_slots=12,
        num_kv_heads=3,
        head_dim=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    before = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
    cache.copy_blocks(sources, targets, 2)
    for old, new in zip(before, (*cache.keys, *cache.values), strict=True):
        want = old.clone()
        for source, target in zip(sources, targets, strict=True):
            want[:, 2 * target : 2 * target + 2] = old[:, 2 * source : 2 * source + 2]
        assert torch.equal(new, want)


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
