"""A pool under random arrivals: how full it is, how fast each user is served, how long one waits.

Arrivals at rate lambda meet a pool whose speed depends on how many requests are in it. As all of
them advance together (processor sharing), the stationary law of their number n is that of a birth
and death chain, whatever the law of the output lengths:

    pi(n) = pi(n - 1) * lambda / mu(n),    mu(n) requests finished per second with n in the pool.

Placement keeps the lanes level, so n requests are n / V a lane. What finds every lane full waits in
the router's queue.

Shape legend: K requests of one lane, n requests of the pool, Q quantiles of texts, S sampled
requests, M moments (`deploy.simulation.rates_waiting`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deploy.simulation.rates import LaneRates
from deploy.simulation.rates_law import Percentiles, coarse, percentiles
from deploy.simulation.rates_round import Round
from deploy.simulation.rates_waiting import Prefill

F64 = NDArray[np.float64]

_GRID: Final = 1.4
"""Concurrencies are worked out in steps of this factor, with straight lines between them."""
_QUANTILES: Final = 32
_SPARE: Final = 1e-9


@dataclass(frozen=True, kw_only=True)
class PoolState:
    """A pool under steady traffic."""

    requests_per_s: float
    """Served."""
    tokens_per_s: float
    """Emitted, the first token of each request included."""
    num_decoding: float
    """Mean, over the pool."""
    num_waiting: float
    """Mean, in the router's queue."""
    user_tokens_per_s: Percentiles
    """5th, 50th and 95th percentile over requests, after the first token."""
    ttft_s: Percentiles
    """50th, 95th and 99th percentile."""
    attainment: float
    """Share of requests that meet both targets."""
    ttft_attainment: float
    rate_attainment: float
    num_verified: float
    """Drafts verified per row, mean over rounds."""
    tau: float
    verifier_busy: float
    drafter_busy: float


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a request is promised."""

    ttft_s: float = math.inf
    tokens_per_s: float = 0.0


class PoolRates:
    """Speed and waiting of V lanes as a function of how many requests they hold.

    Args:
        lane: with its share of the drafters.
        num_lanes: V.
        most: requests of one lane, by its limit or its memory.
        most_waiting: requests in the router's queue; beyond, they are refused.
    """

    def __init__(
        self, lane: LaneRates, *, num_lanes: int, most: int, most_waiting: int = 256
    ) -> None:
        assert most >= 1
        assert num_lanes >= 1
        self._lane = lane
        self._num_lanes = num_lanes
        self._most_waiting = most_waiting
        self._prefill = prefill = Prefill(lane.pair)
        rounds = [lane.at(held) for held in _grid(most)]
        # More requests never make a lane slower; a play's chance must not say so.
        finished = np.maximum.accumulate([self._finished_per_s(r) for r in rounds])
        decoding = np.array([r.num_decoding for r in rounds])
        held = np.array([0.0, *(r.num_requests for r in rounds)])
        self._lane_K = np.arange(most + 1, dtype=np.float64)

        def over(columns: F64, *, empty: bool = False) -> F64:
            """A table over rounds as one over K [K, ...]; an empty lane is idle, or else is taken
            for one of a single request."""
            first = np.zeros_like(columns[:1]) if empty else columns[:1]
            table = np.concatenate([first, columns]).reshape(len(held), -1)
            return np.stack([np.interp(self._lane_K, held, c) for c in table.T], axis=1)

        self._decoding_K = over(decoding, empty=True)[:, 0]
        self._finished_K = over(finished, empty=True)[:, 0]
        busy = np.array([(r.verifier_busy, r.drafter_busy) for r in rounds])
        self._busy_K2 = over(busy, empty=True)
        self._round_K2 = over(np.array([(r.num_verified, r.tau) for r in rounds]))
        self._wait_K4 = over(np.array([prefill.columns(r) for r in rounds]))
        self._speed_KQ = over(np.array([self._user_speeds(r) for r in rounds]))

    @property
    def capacity(self) -> float:
        """Requests per second that the pool serves with every lane full, hence for ever."""
        return float(self._finished_K[-1]) * self._num_lanes

    @property
    def most_in_lanes(self) -> int:
        """Requests that fit into all lanes."""
        return self._num_lanes * (len(self._lane_K) - 1)

    @property
    def most(self) -> int:
        """Requests that fit, the queue included."""
        return self.most_in_lanes + self._most_waiting

    def finished_per_s(self, n: F64) -> F64:
        """Requests finished per second with so many in the pool, any shape."""
        finished: F64 = self._num_lanes * np.interp(
            n / self._num_lanes, self._lane_K, self._finished_K
        )
        return finished

    def stationary(self, requests_per_s: float) -> F64:
        """Law of the number of requests in the pool, the queue included, from 0 up."""
        n = np.arange(1, self.most + 1, dtype=np.float64)
        steps = np.log(max(requests_per_s, _SPARE)) - np.log(self.finished_per_s(n))
        log_pi = np.concatenate([[0.0], np.cumsum(steps)])
        pi = np.exp(log_pi - log_pi.max())
        law: F64 = pi / pi.sum()
        return law

    # --- states -------------------------------------------------------------------------------

    def state(self, requests_per_s: float, target: Target | None = None) -> PoolState:
        """The pool under Poisson traffic. What the full queue refuses is not served, and has not
        been given what it was promised."""
        return self.state_of(self.stationary(requests_per_s), target or Target())

    def closed(self, num_requests: int, target: Target | None = None) -> PoolState:
        """The pool with always the same number of requests: who has ended is replaced at once."""
        law = np.zeros(num_requests + 1)
        law[num_requests] = 1.0
        return self.state_of(law, target or Target(), joins=0)

    def state_of(self, law: F64, target: Target, *, joins: int = 1) -> PoolState:
        """The pool if it holds n requests with probability ``law[n]``.

        Args:
            joins: a request that comes is the one behind those (1), or one of them (0).
        """
        n, weight_n = coarse(law)
        held = np.minimum(n, self.most_in_lanes)
        finished = float(weight_n @ self.finished_per_s(held))
        decoding_n = self._at(held, self._decoding_K[:, None])[:, 0] * self._num_lanes
        decoding = float(weight_n @ decoding_n)
        by_row_n = weight_n * decoding_n / max(decoding, _SPARE)
        num_verified, tau = (by_row_n @ self._at(held, self._round_K2)).tolist()
        verifier_busy, drafter_busy = (weight_n @ self._at(held, self._busy_K2)).tolist()
        served_n = np.where(n + joins > self.most, 0.0, weight_n)  # a full queue refuses
        ttft_nM, speed_nQ = self._met(n + joins)
        in_time_n = (ttft_nM <= target.ttft_s).mean(axis=1)
        fast_n = (speed_nQ >= target.tokens_per_s).mean(axis=1)
        return PoolState(
            requests_per_s=finished,
            tokens_per_s=finished * self._lane.pair.lengths.output.mean,
            num_decoding=decoding,
            num_waiting=float(weight_n @ (n - held)),
            user_tokens_per_s=percentiles(speed_nQ, served_n, (5, 50, 95)),
            ttft_s=percentiles(ttft_nM, served_n, (50, 95, 99)),
            attainment=float(served_n @ (in_time_n * fast_n)),
            ttft_attainment=float(served_n @ in_time_n),
            rate_attainment=float(served_n @ fast_n),
            num_verified=num_verified,
            tau=tau,
            verifier_busy=verifier_busy,
            drafter_busy=drafter_busy,
        )

    def _met(self, n: F64) -> tuple[F64, F64]:
        """What the n-th request meets: times to its first token [n, M], and speeds [n, Q]."""
        held = np.minimum(n, self.most_in_lanes)
        queue_s = (n - held) / max(self.capacity, _SPARE)
        prefill_s = self._prefill.waits(*self._at(held, self._wait_K4).T)
        return queue_s[:, None] + prefill_s, self._at(held, self._speed_KQ)

    def _at(self, held: F64, table_K: F64) -> F64:
        """Columns of a table at so many requests in all lanes."""
        lane = held / self._num_lanes
        return np.stack([np.interp(lane, self._lane_K, c) for c in table_K.T], axis=1)

    # --- of a round ---------------------------------------------------------------------------

    def _finished_per_s(self, one: Round) -> float:
        return one.tokens_per_s / self._lane.tokens_per_request()

    def _user_speeds(self, one: Round) -> F64:
        """Tokens per second of requests [Q], from the hardest text to the easiest.

        Adaptive lengths give good rows more than the mean: all are scaled so that rounds have the
        tau of the lane.
        """
        tau_S = np.sort(self._lane.steps.blocks.tau_by_request(one.num_verified))
        tau_S *= one.tau * (1 / tau_S).mean()
        tau_Q = tau_S.reshape(_QUANTILES, -1).mean(axis=1)
        speeds: F64 = tau_Q / one.cycle_s
        return speeds


def _grid(most: int) -> list[int]:
    """Concurrencies from 1 to ``most``, denser where few."""
    rows = [1]
    while rows[-1] < most:
        rows.append(min(max(rows[-1] + 1, round(rows[-1] * _GRID)), most))
    return rows
