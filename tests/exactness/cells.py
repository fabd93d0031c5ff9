"""Exact integration over random numbers: finite cells on which every decision is constant.

Rejection mode compares each uniform with thresholds that p and q determine (partial sums of a law
in some order, acceptance ratios). Between two neighbouring thresholds nothing changes, so points
of an interval, weighted by its length, integrate exactly. Where the number of dimensions allows,
points sit just inside both ends: production with a threshold of its own would split a cell, and
the law would show it.

Coupled mode takes argmax(log w + G). With E = exp(-G), a unit exponential per token, that is the
winner of a race, argmin E_v / w_v: it depends on the direction of E alone, which is uniform
on the simplex. Each pair of tokens and each law cuts the simplex along E_i / w_i = E_j / w_j,
a straight line; the convex cells of all cuts, weighted by their size, integrate exactly over any
number of laws (p and q, of every context) that meet the same noise.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

_INSET = 1e-7
"""Distance of a point from the end of its cell, as a share of the cell."""


def intervals(thresholds: Iterable[float], *, ends: bool) -> tuple[np.ndarray, np.ndarray]:
    """Points and weights of the intervals that thresholds cut (0, 1) into.

    ``ends``: two points each, just inside, with half the weight; otherwise the midpoint.
    """
    inner = [t for t in thresholds if 0 < t < 1]
    edges = np.unique(np.array([0.0, *inner, 1.0]))
    lengths = np.diff(edges)
    wide = lengths > 1e-14  # thresholds equal up to rounding
    left, lengths = edges[:-1][wide], lengths[wide]
    if not ends:
        return left + lengths / 2, lengths
    points = np.concatenate([left + _INSET * lengths, left + (1 - _INSET) * lengths])
    return points, np.tile(lengths / 2, 2)


def partial_sums(law: Sequence[float]) -> list[float]:
    """Sums of all subsets: the thresholds of an inverse CDF over ``law`` in any order."""
    return [
        sum(subset) for num in range(len(law)) for subset in itertools.combinations(law, num + 1)
    ]


def product(
    parts: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray]:
    """Points [n, len(parts), ...] and weights [n] of independent numbers together."""
    grids = list(itertools.product(*[range(len(weights)) for _, weights in parts]))
    points = [[parts[i][0][j] for i, j in enumerate(at)] for at in grids]
    weights = [np.prod([parts[i][1][j] for i, j in enumerate(at)]) for at in grids]
    return np.array(points), np.array(weights)


def race_cells(laws: np.ndarray, *, ends: bool) -> tuple[np.ndarray, np.ndarray]:
    """Uniforms to inject [n, V] and weights [n] of the cells that laws [L, V] cut (V is 2 or 3).

    ``ends``: a point just inside every corner of a cell; otherwise its middle.
    """
    if laws.shape[1] == 2:
        shares, weights = intervals(laws[:, 0] / laws.sum(axis=1), ends=ends)
        arrivals = np.stack([shares, 1 - shares], axis=1)
    else:
        polygons = [np.eye(3)]
        for law in laws:
            for i, j in itertools.combinations(range(3), 2):
                line = np.zeros(3)
                line[i], line[j] = law[j], -law[i]
                polygons = [part for whole in polygons for part in _split(whole, line)]
        points, sizes = [], []
        for polygon in polygons:
            middle = polygon.mean(axis=0, keepdims=True)
            inside = polygon + (middle - polygon) * _INSET if ends else middle
            points.extend(inside)
            sizes.extend([_area(polygon) / len(inside)] * len(inside))
        arrivals, weights = np.array(points), np.array(sizes)
    return np.exp(-arrivals), weights


def _split(polygon: np.ndarray, line: np.ndarray) -> list[np.ndarray]:
    """Both sides of a convex polygon [n, 3] along ``line . point = 0``; empty sides left out."""
    side = polygon @ line
    parts = []
    for sign in (1, -1):
        corners = []
        for n, point in enumerate(polygon):
            after, height, height_after = (
                polygon[(n + 1) % len(polygon)],
                sign * side[n],
                sign * side[(n + 1) % len(polygon)],
            )
            if height >= 0:
                corners.append(point)
            if height * height_after < 0:
                corners.append(point + (after - point) * height / (height - height_after))
        if len(corners) >= 3 and _area(np.array(corners)) > 1e-14:
            parts.append(np.array(corners))
    return parts


def _area(polygon: np.ndarray) -> float:
    """Share of the simplex, by the shoelace formula on two of its coordinates."""
    x, y = polygon[:, 0], polygon[:, 1]
    return float(abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))))
