"""What the index finds is what was put last and not dropped since."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier_service.torch_engine.block_index import BlockIndex

NUM_BLOCKS = 8
HASHES = [b"a", b"b", b"c", b"d"]

moves = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, NUM_BLOCKS - 1), st.sampled_from(HASHES)),
        st.tuples(st.just("drop"), st.integers(0, NUM_BLOCKS - 1), st.just(b"")),
        st.tuples(st.just("touch"), st.just(0), st.sampled_from(HASHES)),
        st.tuples(st.just("forget"), st.just(0), st.sampled_from(HASHES)),
    ),
    max_size=60,
)


@given(moves)
def test_against_a_list_of_pairs(moves: list[tuple[str, int, bytes]]) -> None:
    index = BlockIndex(NUM_BLOCKS)
    held: list[tuple[int, bytes]] = []  # in the order in which they were put
    used: list[bytes] = []  # least recently first
    for move, block, block_hash in moves:
        if move == "put":
            here = [h for b, h in held if b == block]
            if here and here != [block_hash]:
                index.drop([block])
                held = [(b, h) for b, h in held if b != block]
                here = []
            index.put(block, block_hash)
            if not here:
                held.append((block, block_hash))
                used = [h for h in used if h != block_hash] + [block_hash]
        elif move == "drop":
            index.drop([block])
            held = [(b, h) for b, h in held if b != block]
        elif move == "touch":
            index.touch([block_hash])
            if block_hash in used:
                used = [h for h in used if h != block_hash] + [block_hash]
        else:
            assert sorted(index.forget([block_hash])) == sorted(
                b for b, h in held if h == block_hash
            )
            held = [(b, h) for b, h in held if h != block_hash]
        used = [h for h in used if h in {kept for _, kept in held}]
        last = {h: b for b, h in held}
        for h in HASHES:
            assert index.find([h]) == ([last[h]] if h in last else [])
        assert index.num_hashes == len(last)
        # Worth something is what is found, and the more the later it was used.
        assert {b for b in range(NUM_BLOCKS) if index.worth[b]} == set(last.values())
        worth = [index.worth[last[h]] for h in used]
        assert worth == sorted(set(worth))


def test_a_chain_is_found_up_to_its_first_hole() -> None:
    index = BlockIndex(NUM_BLOCKS)
    for block, block_hash in ((5, b"a"), (1, b"b"), (7, b"d")):
        index.put(block, block_hash)
    assert index.find([b"a", b"b", b"c", b"d"]) == [5, 1]


def test_the_head_of_a_chain_is_worth_most() -> None:
    index = BlockIndex(NUM_BLOCKS)
    for block, block_hash in enumerate(HASHES):
        index.put(block, block_hash)
    index.touch(HASHES)
    assert index.worth[:4].tolist() == sorted(index.worth[:4].tolist(), reverse=True)


def test_a_block_holds_one_thing() -> None:
    index = BlockIndex(NUM_BLOCKS)
    index.put(0, b"a")
    with pytest.raises(AssertionError, match="something else"):
        index.put(0, b"b")
