"""The closest sequence that never falls."""

from __future__ import annotations

from collections.abc import Sequence


def isotonic(values: Sequence[float]) -> tuple[float, ...]:
    """Never falling, and closest to ``values`` in the least-squares sense (pooling adjacent
    violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = float(value), 1
        while pools and pools[-1][0] > mean:
            other, more = pools.pop()
            mean, count = (mean * count + other * more) / (count + more), count + more
        pools.append((mean, count))
    return tuple(mean for mean, count in pools for _ in range(count))
