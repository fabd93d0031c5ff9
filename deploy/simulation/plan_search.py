"""The cheapest pools of one kind that keep what was promised.

A size of pools *bears* a load if the promise holds at that load and at every lighter one, so that
what bears a load bears less, and more load never costs less.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from deploy.simulation.plan import PlanSpec
from deploy.simulation.plan_kinds import COLOCATED, DISAGGREGATED, PLAIN, Kind
from deploy.simulation.rates_days import PoolSize
from deploy.simulation.rates_pool import PoolRates, PoolState, Target

_LOADS: Final = (*(0.02 * 1.25**n for n in range(17)), 0.77, 0.83, 0.88, 0.92, 0.96, 0.99)
"""Shares of a pool's capacity at which the promise is looked at, and between the last that keeps it
and the first that does not ..."""
_HALVINGS: Final = 6
"""... so many more."""
_MOST_DRAFTERS: Final = 3
"""Drafters of a verifier that are looked at."""
_MORE: Final = 13 / 12
_LEAST_MORE: Final = 1e-6
_FINE: Final = 16
"""Sizes up to this are all tried; larger ones in steps of a sixteenth."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The best that one way on one kind of devices can do."""

    way: str
    verifier: str
    """Name of the device."""
    drafter: str
    """Empty: none of its own."""
    size: PoolSize | None = None
    """None: nothing that is allowed keeps the promise."""
    reason: str = ""
    """Then: which bound fails."""
    dollars_per_hour: float = math.inf
    dollars_per_mtok: float = math.inf
    """Of a million tokens emitted, at the load asked about."""
    bears_per_s: float = 0.0
    """Requests per second up to which the promise holds."""
    state: PoolState | None = None
    """At the load asked about."""

    @property
    def name(self) -> str:
        """Pools and devices in words."""
        assert self.size is not None
        own = f", {_counted(self.size.drafters, 'drafter')} on {self.drafter}"
        verifiers = _counted(self.size.verifiers, "verifier")
        return f"{self.way}: {verifiers} on {self.verifier}{own if self.drafter else ''}"


class KindSearch:
    """Offers of one kind for any load; what a size bears is worked out once.

    What an offer must bear is more than the load by as much as events have shown to be needed.
    """

    def __init__(self, kind: Kind, plan: PlanSpec) -> None:
        self.kind = kind
        self._spare = 1.0
        self._plan = plan
        self._limits = plan.limits
        self._bears: dict[PoolSize, float] = {}

    def offer(self, requests_per_s: float) -> Offer:
        """The cheapest size that bears the load."""
        kind = self.kind
        nothing = Offer(
            way=kind.way,
            verifier=kind.verifier.name,
            drafter=kind.drafter.name if kind.drafter else "",
            reason=kind.reason,
        )
        if kind.deployment is None:
            return nothing
        if reason := _alone(kind, self._plan):
            return replace(nothing, reason=reason)
        size = self._cheapest(requests_per_s * self._spare)
        if size is None:
            return replace(nothing, reason=self._too_small(requests_per_s * self._spare))
        state = kind.deployment.pool(size).state(requests_per_s, kind.deployment.target)
        dollars = kind.dollars(size)
        return replace(
            nothing,
            size=size,
            dollars_per_hour=dollars,
            dollars_per_mtok=dollars_per_mtok(dollars, state.tokens_per_s),
            bears_per_s=self.bears(size),
            state=state,
        )

    def refute(self, offer: Offer, requests_per_s: float) -> None:
        """This offer does not bear the load, whatever the rate model says: from now on offers have
        to bear more, by its account, than this one does, and a twelfth more than so far."""
        shown = offer.bears_per_s / requests_per_s
        self._spare = max(self._spare * _MORE, shown * (1 + _LEAST_MORE))

    def bears(self, size: PoolSize) -> float:
        """Requests per second up to which the promise holds."""
        assert self.kind.deployment is not None
        if size not in self._bears:
            self._bears[size] = bearable(
                self.kind.deployment.pool(size),
                self.kind.deployment.target,
                self._plan.slo.attainment,
            )
        return self._bears[size]

    def _cheapest(self, rate: float) -> PoolSize | None:
        best: PoolSize | None = None
        for verifiers in ladder(self._limits.max_verifiers):
            least = PoolSize(verifiers=verifiers, drafters=self._least_drafters(verifiers))
            if best is not None and self.kind.dollars(least) >= self.kind.dollars(best):
                break
            if verifiers * self._most_of_one < rate:
                continue
            found = self._with(verifiers, rate)
            if found and (best is None or self.kind.dollars(found) < self.kind.dollars(best)):
                best = found
        return best

    @cached_property
    def _most_of_one(self) -> float:
        """Requests per second that a verifier with all the drafters it can use serves at most, and
        none serves more for being one of several."""
        assert self.kind.deployment is not None
        drafters = 0 if self.kind.way == PLAIN else _MOST_DRAFTERS if self.kind.drafter else 1
        return self.kind.deployment.pool(PoolSize(verifiers=1, drafters=drafters)).capacity

    def _with(self, verifiers: int, rate: float) -> PoolSize | None:
        """The fewest drafters with which so many verifiers bear the load, found by halving: another
        drafter never makes blocks later."""
        least = self._least_drafters(verifiers)
        if self.kind.drafter is None:
            size = PoolSize(verifiers=verifiers, drafters=least)
            return size if self.bears(size) >= rate else None
        # Past so many, another one changes nothing any more.
        most = min(max(_MOST_DRAFTERS * verifiers, least), self._limits.max_drafters)
        sizes = [
            PoolSize(verifiers=verifiers, drafters=drafters)
            for drafters in ladder(most)
            if drafters >= least
        ]
        # Few are quicker looked at than many: up in doubles, then between the last two.
        low, high = 0, 1
        while high < len(sizes) and self.bears(sizes[high - 1]) < rate:
            low, high = high, 2 * high
        few = sizes[low:high]
        if not few or self.bears(few[-1]) < rate:
            return None
        return few[bisect.bisect_left(few, rate, key=self.bears)]

    def _least_drafters(self, verifiers: int) -> int:
        """What the ways without a pool of their own have, and what draft memory asks for."""
        if self.kind.way == PLAIN:
            return 0
        if self.kind.drafter is None:
            return verifiers
        assert self.kind.deployment is not None
        sessions = verifiers * self.kind.deployment.pair.most_requests
        return max(math.ceil(sessions / self.kind.sessions_per_drafter), 1)

    def _too_small(self, rate: float) -> str:
        bears, size = max(
            ((bears, size) for size, bears in self._bears.items()), default=(0.0, PoolSize())
        )
        if self._bears and not bears:
            return (
                f"load: none of the {len(self._bears)} sizes tried keeps the promise under any "
                f"load, only for a request that is alone"
            )
        return (
            f"load: {rate:g} requests/s are more than {self._limits.max_verifiers} verifiers and "
            f"{self._limits.max_drafters} drafters bear; the largest size tried "
            f"({size.verifiers} + {size.drafters}) keeps the promise up to {bears:.3g}"
        )


def dollars_per_mtok(dollars_per_hour: float, tokens_per_s: float) -> float:
    """What a million tokens cost; inf for none."""
    return dollars_per_hour / 3600 / tokens_per_s * 1e6 if tokens_per_s else math.inf


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def bearable(pool: PoolRates, target: Target, attainment: float) -> float:
    """Requests per second up to which the promise holds: at each load looked at, up to the first
    where it does not."""
    held, failed = 0.0, math.inf
    for share in _LOADS:
        rate = share * pool.capacity
        if pool.state(rate, target).attainment < attainment:
            failed = rate
            break
        held = rate
    for _ in range(_HALVINGS if math.isfinite(failed) else 0):
        middle = (held + failed) / 2
        if pool.state(middle, target).attainment < attainment:
            failed = middle
        else:
            held = middle
    return held


def ladder(most: int) -> Iterator[int]:
    """Sizes of a pool that are tried."""
    size = 1
    while size <= most:
        yield size
        size += max(size // _FINE, 1)


def _alone(kind: Kind, plan: PlanSpec) -> str:
    """Which bound fails for a request that has a whole pool to itself, "" if none does."""
    assert kind.deployment is not None
    drafters = {DISAGGREGATED: 1, COLOCATED: 1, PLAIN: 0}[kind.way]
    pool = kind.deployment.pool(PoolSize(verifiers=1, drafters=drafters))
    state = pool.closed(1, kind.deployment.target)
    share, slo = plan.slo.attainment, plan.slo
    if state.ttft_attainment < share:
        return (
            f"ttft_s: even alone, a request waits {state.ttft_s[1]:.3g} s for its first token "
            f"(95th percentile), {slo.ttft_s:g} s are promised"
        )
    if state.rate_attainment < share:
        return (
            f"tokens_per_s: even alone, {state.rate_attainment:.0%} of requests are served "
            f"{kind.deployment.target.tokens_per_s:g} tokens/s or more, {share:.0%} must be"
        )
    return ""
