"""Names of random numbers: every part of a name matters, and streams are independent."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import kstest

from cluster.noise import KEYED, Stream, gumbel


def one(stream: Stream, seed: int, position: int, index: int) -> float:
    return float(KEYED.uniform(stream, np.array([seed], np.uint64), [position], [index])[0])


def test_every_part_of_the_name_matters() -> None:
    seed = 0x0123456789ABCDEF
    names = [(s, seed, 5, 9) for s in Stream]
    names += [(Stream.DRAFT, seed ^ bit, 5, 9) for bit in (1, 1 << 31, 1 << 32, 1 << 63)]
    names += [(Stream.DRAFT, seed, 9, 5), (Stream.DRAFT, seed, 6, 9), (Stream.DRAFT, seed, 5, 10)]
    assert len({one(*name) for name in names}) == len(names)


def test_same_name_same_number() -> None:
    seeds = np.array([3, 1 << 63], np.uint64)
    batch = KEYED.uniform(Stream.GUMBEL, seeds[:, None], np.array([[4], [5]]), np.arange(7))
    assert batch.shape == (2, 7)
    for i, j in np.ndindex(2, 7):
        assert batch[i, j] == one(Stream.GUMBEL, int(seeds[i]), 4 + i, j)


def test_values_are_part_of_the_contract() -> None:
    """A rolling update must not change what a seed means."""
    assert [s.value for s in Stream] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert one(Stream.DRAFT, 0, 0, 0) != one(Stream.ACCEPT, 0, 0, 0)


@pytest.mark.parametrize("other", [s for s in Stream if s is not Stream.DRAFT])
def test_streams_are_uncorrelated(other: Stream) -> None:
    """Draft numbers say nothing about those that judge or replace the draft."""
    seeds = np.arange(40_000, dtype=np.uint64)
    draft, judge = (KEYED.uniform(s, seeds, 11, 1) for s in (Stream.DRAFT, other))
    assert abs(np.corrcoef(draft, judge)[0, 1]) < 4 / np.sqrt(len(seeds))


def test_gumbel_law() -> None:
    noise = gumbel(KEYED.uniform(Stream.GUMBEL, np.zeros(1, np.uint64), 3, np.arange(50_000)))
    assert kstest(noise, "gumbel_r").pvalue > 1e-3
    assert np.isfinite(gumbel(np.array([2.0**-53, 1 - 2.0**-53]))).all()
