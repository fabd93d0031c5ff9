"""Reliability tables: promised probability against what came true, slowly forgetting. Pure data.

Shape legend: C cells (one table each), M bins of a table, N samples.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]


class ReliabilityTables:
    """One table per cell: how often what was promised so much came true, bin by bin.

    A new sample in a cell takes ``1 / memory`` off the weight of every older one in that cell, so
    a cell weighs at most ``memory`` samples. The clock of a cell is its own samples: one that is
    seldom seen forgets nothing meanwhile.

    Args:
        num_cells: C.
        num_bins: M, equally wide over [low, high]; values outside fall into the end bins.
        memory: samples.
    """

    def __init__(
        self, *, num_cells: int, num_bins: int, low: float, high: float, memory: float
    ) -> None:
        self.weights = np.zeros((num_cells, num_bins))
        """[C, M] decayed number of samples."""
        self.values = np.zeros((num_cells, num_bins))
        """[C, M] decayed sum of what was promised."""
        self.hits = np.zeros((num_cells, num_bins))
        """[C, M] decayed number of samples that came true."""
        self._low = low
        self._bins_per_unit = num_bins / (high - low)
        self._keep = 1.0 - 1.0 / memory

    def add(self, cell_N: I64, value_N: F64, hit_N: Bools) -> None:
        """Take samples in. The order within one call does not matter."""
        if not len(cell_N):
            return
        # Most cells have no part in it: those between the first and the last that have.
        first, last = int(np.minimum.reduce(cell_N)), int(np.maximum.reduce(cell_N))
        num_cells, num_bins = 1 + last - first, self.weights.shape[1]
        cell_N = cell_N - first
        bin_N = ((value_N - self._low) * self._bins_per_unit).astype(np.int64)
        place_N = cell_N * num_bins + np.minimum(np.maximum(bin_N, 0), num_bins - 1)
        fade_C = self._keep ** np.bincount(cell_N, minlength=num_cells)
        for table, weight_N in ((self.weights, None), (self.values, value_N), (self.hits, hit_N)):
            part = table[first : last + 1]
            part *= fade_C[:, None]
            part += np.bincount(place_N, weight_N, num_cells * num_bins).reshape(part.shape)

    def means(self) -> tuple[F64, F64]:
        """Mean promised and mean come true of each cell [C]; 0 where there is no sample."""
        weight_C = np.maximum(self.weights.sum(axis=1), np.finfo(np.float64).tiny)
        return self.values.sum(axis=1) / weight_C, self.hits.sum(axis=1) / weight_C

    def expected_error(self) -> F64:
        """ECE of each cell [C]: mean distance of promised and come true over the bins, by weight.

        It is never quite 0: n samples in a bin miss their own mean by about ``0.4 / sqrt(n)``.
        """
        weight_C = np.maximum(self.weights.sum(axis=1), np.finfo(np.float64).tiny)
        gaps: F64 = np.abs(self.values - self.hits).sum(axis=1) / weight_C
        return gaps
