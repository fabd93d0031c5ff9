"""The rolling digest."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cluster import digest

ids = st.lists(st.integers(0, 200_000), max_size=20)


def test_known_values() -> None:
    assert digest.of([]) == 0xCBF29CE484222325
    # FNV-1a by hand: ((seed ^ (0 + 1)) * prime) mod 2**64
    assert digest.of([0]) == (0xCBF29CE484222324 * 0x100000001B3) % (1 << 64)


@given(ids, ids)
def test_rolls(left: list[int], right: list[int]) -> None:
    assert digest.extend(digest.of(left), right) == digest.of(left + right)
    assert 0 <= digest.of(left) < 1 << 64


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=20), st.data())
def test_sees_any_changed_id_and_the_length(prefix: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(prefix) - 1))
    changed = prefix.copy()
    changed[place] += 1
    assert digest.of(changed) != digest.of(prefix)
    assert digest.of([*prefix, 0]) != digest.of(prefix)
    assert digest.of(prefix[:-1]) != digest.of(prefix)


def test_rows_are_extended_as_one_by_one() -> None:
    ids = np.array([[5, 0, 7], [1, 2, 3], [9, 9, 9]], np.int64)
    before = np.array([digest.SEED, digest.of([4]), digest.of([4, 4])], np.uint64)
    after = digest.extend_rows(before, ids, np.array([3, 1, 0]))
    expected = [
        digest.of([5, 0, 7]),
        digest.of([4, 1]),
        digest.of([4, 4]),
    ]
    assert after.tolist() == expected


def test_extending_rows_leaves_the_prefixes_as_they_were() -> None:
    before = np.array([1, 2], np.uint64)
    digest.extend_rows(before, np.array([[5], [6]], np.int64), np.array([1, 1]))
    assert before.tolist() == [1, 2]
