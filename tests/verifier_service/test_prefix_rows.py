"""Hashes say exactly which prefixes are equal; rows come back for those, and only for those."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verifier_service.prefix_rows import BlockFiller, PrefixRows, block_hashes

SIZE = 4
WIDTH = 3
BLOCK_BYTES = SIZE * WIDTH * 4

id_lists = st.lists(st.integers(0, 2), max_size=20)


def rows_of(first: int, end: int, *, offset: float = 0.0) -> torch.Tensor:
    """Rows [end - first, WIDTH] that tell their positions."""
    positions = torch.arange(first, end, dtype=torch.float32) + offset
    return positions[:, None] + torch.arange(WIDTH) / 8


def make_store(num_blocks: int = 64, **changes: bytes) -> PrefixRows:
    return PrefixRows(max_bytes=num_blocks * BLOCK_BYTES, block_tokens=SIZE, **changes)


def chain(num_blocks: int, salt: bytes = b"") -> list[bytes]:
    return block_hashes(range(num_blocks * SIZE), SIZE, salt=salt)


# --- hashes --------------------------------------------------------------------------------------


@given(id_lists, id_lists, st.integers(1, 6))
def test_hashes_are_equal_where_the_prefixes_are(a: list[int], b: list[int], size: int) -> None:
    ours, theirs = block_hashes(a, size), block_hashes(b, size)
    assert (len(ours), len(theirs)) == (len(a) // size, len(b) // size)
    for block, (x, y) in enumerate(zip(ours, theirs, strict=False)):
        end = (block + 1) * size
        assert (x == y) == (a[:end] == b[:end])
    assert len(set(ours)) == len(ours)


@given(id_lists, st.integers(0, 6))
def test_known_hashes_are_taken_over(ids: list[int], num_known: int) -> None:
    whole = block_hashes(ids, SIZE, salt=b"s")
    assert block_hashes(ids, SIZE, salt=b"s", known=whole[:num_known]) == whole
    longer = block_hashes([*ids, *range(SIZE)], SIZE, salt=b"s")
    assert block_hashes(ids, SIZE, salt=b"s", known=longer) == whole, "only whole blocks of ids"
    invented = [bytes(32)] * len(whole[:1])
    assert block_hashes(ids, SIZE, known=invented)[:1] == invented, "they are not computed again"


def test_salts_share_nothing() -> None:
    salts = (b"", b"a", b"b", b"ab")
    hashes = [h for salt in salts for h in chain(5, salt)]
    assert len(set(hashes)) == 20


# --- the store -----------------------------------------------------------------------------------

moves = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 9)),
        st.tuples(st.just("hits"), st.integers(1, 10)),
        st.tuples(st.just("forget"), st.integers(0, 9)),
    ),
    max_size=60,
)


@given(moves, st.integers(0, 6))
def test_the_store_is_least_recently_used_first_out(
    moves: list[tuple[str, int]], room: int
) -> None:
    """Against a list in order of use."""
    store, hashes = make_store(room), chain(10)
    used: list[int] = []
    num_evicted = 0
    for move, number in moves:
        if move == "put":
            store.put(hashes[number], rows_of(number * SIZE, (number + 1) * SIZE))
            if number in used:
                used.remove(number)
            elif room and len(used) == room:
                used.pop(0)
                num_evicted += 1
            used += [number] if room else []
        elif move == "hits":
            expected = next((i for i in range(number) if i not in used), number)
            assert store.hits(hashes[:number]) == expected
            head = list(range(expected))
            used = [i for i in used if i not in head] + head[::-1]
        else:
            store.forget([hashes[number]])
            used = [i for i in used if i != number]
        assert store.num_blocks == len(used)
        assert store.num_bytes == len(used) * BLOCK_BYTES
        assert store.num_evicted == num_evicted
    for number in used:
        want = rows_of(number * SIZE, (number + 1) * SIZE)
        assert torch.equal(store.rows([hashes[number]]), want)


def test_rows_of_a_chain_come_in_order() -> None:
    store, hashes = make_store(), chain(3)
    for number in (2, 0, 1):
        store.put(hashes[number], rows_of(number * SIZE, (number + 1) * SIZE))
    assert torch.equal(store.rows(hashes), rows_of(0, 3 * SIZE))


def test_a_put_is_a_copy() -> None:
    store, (first,) = make_store(), chain(1)
    rows = rows_of(0, SIZE)
    store.put(first, rows)
    rows.zero_()
    assert torch.equal(store.rows([first]), rows_of(0, SIZE))


@pytest.mark.parametrize("num_others", [1, 2, 3])
def test_the_tail_of_a_chain_goes_before_its_head(num_others: int) -> None:
    store, hashes = make_store(4), chain(4)
    for number in range(4):
        store.put(hashes[number], rows_of(0, SIZE))
    assert store.hits(hashes) == 4
    for other in block_hashes([9] * num_others * SIZE, SIZE):
        store.put(other, rows_of(0, SIZE))
    assert store.hits(hashes) == 4 - num_others


def test_blocks_of_another_size_are_a_fault() -> None:
    with pytest.raises(AssertionError):
        make_store().put(chain(1)[0], rows_of(0, SIZE - 1))


def test_rows_of_another_projection_are_out_of_reach() -> None:
    """Even for a store that takes over all that another one holds."""
    ours, theirs = make_store(salt=b"drafter-1"), make_store(salt=b"drafter-2")
    (first,) = chain(1)
    theirs.put(first, rows_of(0, SIZE))
    ours._blocks.update(theirs._blocks)
    assert theirs.hits([first]) == 1
    assert ours.hits([first]) == 0


# --- the filler ----------------------------------------------------------------------------------


def fill(
    store: PrefixRows, cuts: Sequence[int], first: int = 0, gap: int | None = None
) -> BlockFiller:
    """Rows of positions ``first ..`` in chunks of these lengths, ``gap`` rows left out once."""
    filler = BlockFiller(store, first_position=first)
    position = first
    for index, length in enumerate(cuts):
        if gap is not None and index == gap:
            position += 1
        end = position + length
        filler.extend(position, rows_of(position, end), range(end))
        position = end
    return filler


@given(
    st.lists(st.integers(0, 11), max_size=8),
    st.integers(0, 9),
    st.one_of(st.none(), st.integers(0, 7)),
)
def test_whole_blocks_arrive_however_rows_are_cut(
    cuts: list[int], first: int, gap: int | None
) -> None:
    store = make_store()
    # What lies before the first row is there already, or the blocks behind it are of no use.
    hashes = chain(40)
    num_before = -(-first // SIZE)
    for number in range(num_before):
        store.put(hashes[number], rows_of(number * SIZE, (number + 1) * SIZE))
    filler = fill(store, cuts, first, gap)
    end = first + sum(cuts[:gap])
    assert filler.stopped == (gap is not None and gap < len(cuts))
    num_whole = max(end // SIZE, num_before)
    assert store.num_blocks == num_whole
    assert store.hits(hashes) == num_whole
    if num_whole:
        assert torch.equal(store.rows(hashes[:num_whole]), rows_of(0, num_whole * SIZE))


def test_rows_that_come_again_are_skipped() -> None:
    """As those of a request that was preempted and is computed anew."""
    store = make_store()
    filler = fill(store, [6])
    filler.extend(0, rows_of(0, 5, offset=100.0), range(5))
    filler.extend(2, torch.cat([rows_of(2, 6, offset=100.0), rows_of(6, 9)]), range(9))
    assert not filler.stopped
    assert torch.equal(store.rows(chain(2)), rows_of(0, 8))


def test_partial_rows_do_not_hold_the_step_they_came_with() -> None:
    store = make_store()
    filler = BlockFiller(store)
    step = rows_of(0, 100)
    filler.extend(0, step[:3], range(3))
    step.zero_()
    filler.extend(3, rows_of(3, 4), range(4))
    assert torch.equal(store.rows(chain(1)), rows_of(0, SIZE))


@pytest.mark.parametrize("cuts", [[40], [3] * 14])
def test_a_chain_longer_than_the_store_keeps_its_head(cuts: list[int]) -> None:
    store = make_store(4)
    store.put(block_hashes([9] * SIZE, SIZE)[0], rows_of(0, SIZE))
    assert fill(store, cuts).stopped
    assert store.hits(chain(10)) == 4


def test_a_chain_that_lost_a_block_goes_no_further() -> None:
    store = make_store()
    filler = BlockFiller(store)
    filler.extend(0, rows_of(0, 8), range(8))
    store.forget(chain(1))
    filler.extend(8, rows_of(8, 12), range(12))
    assert filler.stopped
    filler.extend(12, rows_of(12, 24), range(24))
    assert store.num_blocks == 2, "what nobody can find is not kept"


def test_what_one_request_fills_another_finds_under_its_own_salt_only() -> None:
    store = make_store()
    BlockFiller(store, salt=b"a").extend(0, rows_of(0, 8), range(8))
    assert store.hits(chain(2, b"a")) == 2
    assert store.hits(chain(2)) == store.hits(chain(2, b"b")) == 0
