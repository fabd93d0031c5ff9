"""Hours and days of a deployment in intervals: load swings, backlog, pools that change size.

Within an interval the number of requests follows the fluid limit ``dn/dt = lambda - mu(n)``, which
forgets where it came from within seconds and carries a backlog for as long as one lasts. Around it
they spread as they do in the steady state of the load that the pool serves at that moment.

Times in seconds; a day of one-minute intervals is worked out in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deploy.simulation.rates import LaneRates
from deploy.simulation.rates_pair import PairSpec
from deploy.simulation.rates_pool import PoolRates, PoolState, Target
from deploy.simulation.rates_round import Round

F64 = NDArray[np.float64]

_SUBSTEPS: Final = 60
_FULL: Final = 0.995
"""Share of its capacity from which on a pool is taken to be where the fluid has it."""


@dataclass(frozen=True, kw_only=True, order=True)
class PoolSize:
    """Replicas of both pools."""

    verifiers: int = 1
    drafters: int = 0


@dataclass(frozen=True, kw_only=True)
class Interval:
    """What an autoscaler sees, and what a picture shows."""

    at_s: float
    """Start."""
    arrivals_per_s: float
    size: PoolSize
    num_requests: float
    """In the pool at the end, the queue included."""
    refused_per_s: float
    state: PoolState


Scaler = Callable[[Sequence[Interval]], PoolSize]
"""The size from the next interval on, from all intervals so far."""


class Deployment:
    """A pair in pools of any size; each size is worked out once.

    Args:
        most_waiting: requests in the routers' queues, per verifier.
    """

    def __init__(self, pair: PairSpec, *, target: Target, most_waiting: int = 256) -> None:
        self.pair = pair
        self.target = target
        self._most_waiting = most_waiting
        self._steps = pair.steps()
        self._played: dict[tuple[int, int, int], Round] = {}
        self._pools: dict[PoolSize, PoolRates] = {}

    def pool(self, size: PoolSize) -> PoolRates:
        """Speed and waiting at this size."""
        if size not in self._pools:
            lane = LaneRates(
                self.pair,
                num_lanes=size.verifiers,
                num_drafters=size.drafters,
                steps=self._steps,
                played=self._played,
            )
            self._pools[size] = PoolRates(
                lane,
                num_lanes=size.verifiers,
                most=self.pair.most_requests,
                most_waiting=self._most_waiting * size.verifiers,
            )
        return self._pools[size]

    def play(
        self,
        arrivals_per_s: Sequence[float],
        *,
        interval_s: float,
        size: PoolSize,
        scaler: Scaler | None = None,
    ) -> list[Interval]:
        """Play traffic, one rate per interval.

        Args:
            size: to begin with, and throughout if nobody scales.
        """
        played: list[Interval] = []
        num = 0.0
        for index, rate in enumerate(arrivals_per_s):
            pool = self.pool(size)
            num, served, refused = _flow(pool, num, rate, interval_s)
            state = pool.state_of(_law(pool, num, served), self.target)
            played.append(
                Interval(
                    at_s=index * interval_s,
                    arrivals_per_s=rate,
                    size=size,
                    num_requests=num,
                    refused_per_s=refused,
                    state=state,
                )
            )
            if scaler is not None:
                size = scaler(played)
        return played


def _flow(
    pool: PoolRates, num: float, rate: float, interval_s: float
) -> tuple[float, float, float]:
    """Requests at the end of an interval, those served and those refused per second.

    Implicit steps, stable however fast the pool is: ``n' = n + dt (lambda - mu(n'))``.
    """
    step_s = interval_s / _SUBSTEPS
    most = float(pool.most)
    grid = np.linspace(0.0, most, 4097)
    after = grid + step_s * pool.finished_per_s(np.minimum(grid, pool.most_in_lanes))
    served = refused = 0.0
    for _ in range(_SUBSTEPS):
        before = num + step_s * rate
        num = float(np.interp(before, after, grid))
        served += before - num
        if before > after[-1]:
            refused += before - float(after[-1])
            served -= before - float(after[-1])
    return num, served / interval_s, refused / interval_s


def _law(pool: PoolRates, num: float, served_per_s: float) -> F64:
    """Where the pool is around the fluid's number of requests."""
    if served_per_s < _FULL * pool.capacity and num <= pool.most_in_lanes:
        return pool.stationary(served_per_s)
    law = np.zeros(pool.most + 1)
    whole = min(int(num), pool.most - 1)
    law[whole], law[whole + 1] = 1 - (num - whole), num - whole
    return law
