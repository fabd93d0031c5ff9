"""What a lane yields with a given number of requests, in the steady state; each is worked out once.

Pools of any size are told by a few lanes: contention at the drafters depends on how many lanes
share how many drafters, and hardly on how often that pattern is repeated. A gated lane drafts where
that is quicker than decoding without: the steady state that the gate aims at (`router.gating`).
"""

from __future__ import annotations

from typing import Final

from deploy.simulation.rates_pair import PairSpec
from deploy.simulation.rates_play import Play
from deploy.simulation.rates_round import Round
from deploy.simulation.rates_steps import StepSampler

_MOST_LANES: Final = 4
"""That are played of a larger pool, if they have a drafter or more between them."""


class LaneRates:
    """Steady rounds of a lane, by the requests in it.

    Args:
        pair: verifier, drafter, texts, links.
        num_lanes: verifiers that share the drafters.
        num_drafters: the rows of each lane are spread over them all.
        steps: of ``pair``; pools of other sizes may share them.
        played: rounds by requests, lanes and drafters; likewise.
    """

    def __init__(
        self,
        pair: PairSpec,
        *,
        num_lanes: int = 1,
        num_drafters: int = 1,
        steps: StepSampler | None = None,
        played: dict[tuple[int, int, int], Round] | None = None,
    ) -> None:
        self.pair = pair
        self.steps = steps or pair.steps()
        self._played = {} if played is None else played
        self._rounds: dict[int, Round] = {}
        self._shapes = shapes(num_lanes, num_drafters)

    def at(self, num_requests: int) -> Round:
        """The round that the lane settles in with so many requests (1 or more)."""
        if num_requests not in self._rounds:
            self._rounds[num_requests] = self._best(num_requests)
        return self._rounds[num_requests]

    def tokens_per_request(self) -> float:
        """Tokens that rounds have to yield for a request of mean length: all but the first, which
        its prefill gives."""
        return max(self.pair.lengths.output.mean - 1, 1.0)

    def _best(self, num_requests: int) -> Round:
        scheduling = self.pair.scheduling
        plain = self._play(num_requests, 1, 0)
        if scheduling.policy in ("none", "fixed:0") or not self._shapes:
            return plain
        (lanes, drafters, _), *rest = self._shapes
        drafted = self._play(num_requests, lanes, drafters)
        for lanes, drafters, share in rest:
            drafted = drafted.mixed(self._play(num_requests, lanes, drafters), share)
        if scheduling.gate_drafts and plain.tokens_per_s > drafted.tokens_per_s:
            return plain
        return drafted

    def _play(self, num_requests: int, num_lanes: int, num_drafters: int) -> Round:
        key = (num_requests, num_lanes, num_drafters)
        if key not in self._played:
            self._played[key] = Play(
                self.pair,
                self.steps,
                num_requests=num_requests,
                num_lanes=num_lanes,
                num_drafters=num_drafters,
            ).run()
        return self._played[key]


def shapes(num_lanes: int, num_drafters: int) -> list[tuple[int, int, float]]:
    """Lanes and drafters that are played for a pool, with the share of each in their mean; none
    without drafters.

    A small pool is played as it is. Of a larger one some lanes that have about as many drafters
    between them, or those that share one drafter: the sizes of a ladder around its own.
    """
    if not num_drafters:
        return []
    if num_lanes <= _MOST_LANES:
        return [(num_lanes, num_drafters, 1.0)]
    drafters = num_drafters * _MOST_LANES / num_lanes
    if drafters >= 1:
        return [(_MOST_LANES, size, share) for size, share in _around(drafters)]
    return [(size, 1, share) for size, share in _around(num_lanes / num_drafters)]


def _around(number: float) -> list[tuple[int, float]]:
    """The neighbours among 1, 2, 3, 4, 6, 8, 12, ... with their shares."""
    low, high = 1, 2
    while high < number:
        low, high = high, high + 2 ** max(high.bit_length() - 2, 0)
    share = (number - low) / (high - low)
    return [(size, part) for size, part in ((low, 1 - share), (high, share)) if part]
