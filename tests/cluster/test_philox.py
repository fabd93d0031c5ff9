"""Philox against its published known-answer vectors, and the edges of its uniforms."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.philox import philox4x32, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [0xFFFFFFFF] * 4,
            [0xFFFFFFFF] * 2,
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers(counter: list[int], key: list[int], answer: list[int]) -> None:
    words = philox4x32(np.array(counter, np.uint64), np.array(key, np.uint64))
    assert words.tolist() == answer


def test_batches_equal_single_blocks() -> None:
    rng = np.random.default_rng(0)
    counter = rng.integers(0, 1 << 32, (4, 3, 5), dtype=np.uint64)
    key = rng.integers(0, 1 << 32, (2, 3, 1), dtype=np.uint64)
    words = philox4x32(counter, key)
    for i in range(3):
        for j in range(5):
            assert (words[:, i, j] == philox4x32(counter[:, i, j], key[:, i, 0])).all()


def test_uniforms_never_reach_the_ends() -> None:
    extremes = np.array([[0, 0xFFFFFFFF], [0, 0xFFFFFFFF], [0, 0], [0, 0]], np.uint64)
    assert uniforms(extremes).tolist() == [2.0**-53, 1 - 2.0**-53]


def test_uniforms_are_uniform() -> None:
    counter = np.zeros((4, 200_000), np.uint64)
    counter[0] = np.arange(200_000)
    values = uniforms(philox4x32(counter, np.array([1, 2], np.uint64)))
    counts = np.bincount((values * 100).astype(int), minlength=100)
    assert ((counts - 2000) ** 2 / 2000).sum() < 160  # chi-square, 99 degrees of freedom
