"""Projected rows and ids of live requests, so that a draft session can be rebuilt elsewhere.

Without it, moving a session to another drafter would mean running the target over the whole
prefix again. Host memory, bounded in bytes over all requests: past the bound whole requests are
forgotten, the largest first (of equal ones the least recently committed), so that one long context
never costs many short ones theirs. A forgotten request keeps the session it has, but cannot be
moved: it decodes plainly from the day it loses its drafter.

Shape legend: T rows of a chunk, D draft hidden size.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.errors import FrameError

Features = NDArray[Any]
"""[T, D] in a wire dtype: f4, f2, or u2 holding the bits of bfloat16. [0, 0] for none."""

NO_FEATURES: Features = np.zeros((0, 0), np.float32)


def features_to_wire(features_TD: Tensor | None) -> Features:
    """Rows as they cross the wire, on the host.

    Raises:
        FrameError: not [T, D], a dtype that has no wire form, or values that are not finite.
    """
    if features_TD is None:
        return NO_FEATURES
    if features_TD.ndim != 2:
        raise FrameError(f"features of shape {tuple(features_TD.shape)}, expected [T, D]")
    # A copy of its own: a view would keep the rows of the whole step alive with it.
    rows_TD = features_TD.detach().to("cpu", copy=True).contiguous()
    if not bool(torch.isfinite(rows_TD).all()):
        raise FrameError("features are not finite")
    if rows_TD.dtype == torch.bfloat16:
        return rows_TD.view(torch.int16).numpy().view(np.uint16)
    if rows_TD.dtype not in (torch.float32, torch.float16):
        raise FrameError(f"features of {rows_TD.dtype} have no wire form")
    array: Features = rows_TD.numpy()
    return array


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """Rows of consecutive positions and, for each, the id of the position after it."""

    first_position: int
    ids: NDArray[np.int32]
    features: Features

    @property
    def num_bytes(self) -> int:
        """Memory that its rows and ids take."""
        return self.features.nbytes + self.ids.nbytes


@dataclass
class _Kept:
    chunks: list[Chunk] = field(default_factory=list)
    end: int = 0
    num_bytes: int = 0


class FeatureCache:
    """Rows of live requests from position 0 on, by request id.

    Args:
        max_bytes: over all requests; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_evicted = 0
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[int, _Kept] = OrderedDict()  # least recently committed first

    @property
    def num_bytes(self) -> int:
        """Bytes kept now."""
        return self._num_bytes

    def append(self, rid: int, chunk: Chunk) -> None:
        """Keep a chunk that continues what is kept of ``rid``.

        One that does not (its request was evicted, or is one whose start was never seen) is not
        kept: rows from the middle cannot rebuild a session.
        """
        kept = self._kept.get(rid)
        if kept is None:
            if chunk.first_position != 0:
                return
            kept = self._kept[rid] = _Kept()
        if chunk.first_position != kept.end:
            self.forget(rid)
            return
        kept.chunks.append(chunk)
        kept.end += len(chunk.ids)
        kept.num_bytes += chunk.num_bytes
        self._num_bytes += chunk.num_bytes
        self._kept.move_to_end(rid)
        while self._num_bytes > self._max_bytes:
            # The first of the largest: `max` keeps the order of the dictionary.
            self._evict(max(self._kept, key=lambda other: self._kept[other].num_bytes))

    def _evict(self, rid: int) -> None:
        self.num_evicted += 1
        self.forget(rid)

    def rows(self, rid: int) -> Chunk | None:
        """All rows of ``rid`` from position 0 on, as one chunk; None if they are not (all) kept."""
        kept = self._kept.get(rid)
        if kept is None:
            return None
        if len(kept.chunks) > 1:  # merge in place: the next call costs nothing
            features = np.concatenate([chunk.features for chunk in kept.chunks])
            ids = np.concatenate([chunk.ids for chunk in kept.chunks])
            kept.chunks = [Chunk(first_position=0, ids=ids, features=features)]
        return kept.chunks[0]

    def forget(self, rid: int) -> None:
        """Free what is kept of ``rid``; unknown ids are ignored."""
        kept = self._kept.pop(rid, None)
        if kept is not None:
            self._num_bytes -= kept.num_bytes

    def clear(self) -> None:
        """Free everything."""
        self._kept.clear()
        self._num_bytes = 0
