"""Rows kept for moving a session: complete or not at all, and bounded."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cluster.errors import FrameError
from verifier_service.feature_cache import NO_FEATURES, Chunk, FeatureCache, features_to_wire


def chunk(first: int, num_rows: int, width: int = 4) -> Chunk:
    """Rows that hold their own position; the id behind position p is p + 1."""
    positions = np.arange(first, first + num_rows, dtype=np.float32)
    return Chunk(
        first_position=first,
        ids=np.arange(first + 1, first + num_rows + 1, dtype=np.int32),
        features=np.repeat(positions[:, None], width, axis=1),
    )


ROW_BYTES = 4 * 4 + 4


def test_rows_come_back_whole_and_in_order() -> None:
    cache = FeatureCache(10_000)
    for first, num_rows in [(0, 3), (3, 1), (4, 5)]:
        cache.append(7, chunk(first, num_rows))
    for _ in range(2):  # merging changes nothing
        rows = cache.rows(7)
        assert rows is not None
        assert (rows.first_position, rows.ids.tolist()) == (0, list(range(1, 10)))
        assert rows.ids.dtype == np.int32, "what is counted is what is kept"
        assert rows.num_bytes == rows.features.nbytes + rows.ids.nbytes
        assert (rows.features == chunk(0, 9).features).all()
        assert cache.num_bytes == 9 * ROW_BYTES
    cache.append(7, chunk(9, 1))
    rows = cache.rows(7)
    assert rows is not None
    assert len(rows.ids) == 10


def test_a_hole_forgets_the_request() -> None:
    cache = FeatureCache(10_000)
    cache.append(1, chunk(0, 3))
    cache.append(1, chunk(4, 2))
    assert cache.rows(1) is None
    assert cache.num_bytes == 0
    cache.append(2, chunk(5, 1))  # never seen from its start
    assert cache.rows(2) is None


def test_bounded_the_largest_goes_first_and_whole() -> None:
    cache = FeatureCache(10 * ROW_BYTES)
    cache.append(1, chunk(0, 3))
    cache.append(2, chunk(0, 3))
    cache.append(3, chunk(0, 3))
    cache.append(2, chunk(3, 1))  # full to the byte; 2 is now the largest
    assert cache.num_bytes == 10 * ROW_BYTES
    cache.append(3, chunk(3, 1))  # as large as 2, but committed later
    assert cache.rows(2) is None
    assert cache.rows(1) is not None
    assert cache.rows(3) is not None
    assert (cache.num_evicted, cache.num_bytes) == (1, 7 * ROW_BYTES)
    cache.append(2, chunk(4, 1))  # an evicted one does not come back from its middle
    assert cache.rows(2) is None


def test_a_request_larger_than_the_cache_is_not_kept() -> None:
    cache = FeatureCache(2 * ROW_BYTES)
    cache.append(1, chunk(0, 3))
    assert cache.rows(1) is None
    assert cache.num_bytes == 0
    nothing = FeatureCache(0)
    nothing.append(1, chunk(0, 1))
    assert nothing.rows(1) is None


def test_a_request_larger_than_the_cache_pushes_no_other_out() -> None:
    cache = FeatureCache(6 * ROW_BYTES)
    cache.append(1, chunk(0, 2))
    for first in range(0, 12, 2):  # by chunks, as prompts come
        cache.append(2, chunk(first, 2))
    assert cache.rows(1) is not None
    assert cache.rows(2) is None
    assert (cache.num_bytes, cache.num_evicted) == (2 * ROW_BYTES, 1)


def test_forget_and_clear() -> None:
    cache = FeatureCache(10_000)
    cache.append(1, chunk(0, 3))
    cache.append(2, chunk(0, 3))
    cache.forget(1)
    cache.forget(1)
    assert cache.rows(1) is None
    assert cache.num_bytes == 3 * ROW_BYTES
    cache.clear()
    assert cache.num_bytes == 0


@pytest.mark.parametrize(
    ("dtype", "wire"), [(torch.float32, "<f4"), (torch.float16, "<f2"), (torch.bfloat16, "<u2")]
)
def test_wire_form_keeps_every_bit(dtype: torch.dtype, wire: str) -> None:
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    array = features_to_wire(rows)
    assert array.dtype == np.dtype(wire)
    bits = rows.view(torch.int32 if dtype == torch.float32 else torch.int16)
    assert np.array_equal(array.view(bits.numpy().dtype), bits.numpy())


def test_a_view_does_not_keep_the_step_alive() -> None:
    step = torch.zeros(1000, 4)
    array = features_to_wire(step[10:12])
    step[10:12] = 9.0
    assert array.sum() == 0
    strided = features_to_wire(torch.arange(12.0).reshape(3, 4).T)
    assert np.array_equal(strided, np.arange(12.0).reshape(3, 4).T)


def test_unfit_features_are_refused() -> None:
    assert features_to_wire(None) is NO_FEATURES
    with pytest.raises(FrameError, match="finite"):
        features_to_wire(torch.tensor([[1.0, float("nan")]]))
    with pytest.raises(FrameError, match="finite"):
        features_to_wire(torch.tensor([[float("inf")]], dtype=torch.bfloat16))
    with pytest.raises(FrameError, match="float64"):
        features_to_wire(torch.zeros(1, 1, dtype=torch.float64))
    with pytest.raises(FrameError, match="shape"):
        features_to_wire(torch.zeros(3))
