"""Offers played by events: the real lanes on the pools that the rate model proposed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from cluster.config import RouterConfig
from deploy.simulation.plan import PlanSpec, Traffic
from deploy.simulation.plan_kinds import Kind
from deploy.simulation.plan_search import KindSearch, Offer
from deploy.simulation.scenario import Scenario
from deploy.simulation.traces import TraceSpec
from deploy.simulation.world import World

_WARMUP_S: Final = 10.0
_MOST_QUEUED: Final = 1 << 30
MOST_CHECKS: Final = 4
"""Offers of one way that are played."""
_ENOUGH_S: Final = 240.0
"""Of real time: no further offer of a way is played once its checks have taken so long."""

Progress = Callable[[float, str], None]
"""Told the share of the whole work that has been done since its last call, and what comes next."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """What the events say of an offer."""

    offer: Offer
    kept: float
    """Share of requests that met both targets, taken as independent of each other."""
    confirmed: bool
    """Whether that is as much as was promised."""
    user_tokens_per_s: float
    """5th percentile over requests."""
    ttft_s: float
    """95th percentile."""
    tokens_per_s: float


def confirm(
    searches: Sequence[KindSearch],
    plan: PlanSpec,
    traffic: Traffic,
    seconds: float,
    progress: Progress,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> list[Check]:
    """Play the cheapest offer of some kinds of one way, and each time that it is refuted the
    cheapest that is left, until one is confirmed. What was refuted is not offered again.

    Args:
        searches: of the kinds.
        seconds: of the busiest load that an offer is played for.
        progress: told of shares of this work, 1 in all.
        clock: real time.

    Returns:
        All checks, the confirmed one last; none if nothing keeps the promise by the rate model.
    """
    checks: list[Check] = []
    began_s, share = clock(), 1 / MOST_CHECKS
    while len(checks) < MOST_CHECKS and (not checks or clock() - began_s < _ENOUGH_S):
        offers = [search.offer(traffic.peak_per_s) for search in searches]
        best = min(range(len(offers)), key=lambda n: offers[n].dollars_per_hour)
        offer, search = offers[best], searches[best]
        if offer.size is None:
            break
        told = _told(progress, share, f"by events, {offer.name}")
        checks.append(check(offer, search.kind, plan, traffic, seconds, told))
        if checks[-1].confirmed:
            break
        search.refute(offer, traffic.peak_per_s)
    progress(1 - share * len(checks), "costs by load")
    return checks


def _told(progress: Progress, share: float, what: str) -> Callable[[float], None]:
    progress(0.0, what)
    return lambda part: progress(share * part, what)


def check(
    offer: Offer,
    kind: Kind,
    plan: PlanSpec,
    traffic: Traffic,
    seconds: float,
    progress: Callable[[float], None] | None = None,
) -> Check:
    """Play the busiest load for so long, behind a warm-up."""
    assert offer.size is not None
    assert kind.deployment is not None
    pair, target = kind.deployment.pair, kind.deployment.target
    scenario = Scenario(
        duration_s=_WARMUP_S + seconds,
        warmup_s=_WARMUP_S,
        router=RouterConfig(
            prefill_budget=pair.prefill_budget,
            scheduling=pair.scheduling,
            max_queued_tokens=_MOST_QUEUED,
        ),
        verifier=replace(pair.verifier, num_replicas=offer.size.verifiers),
        drafter=replace(pair.drafter, num_replicas=offer.size.drafters),
        links=pair.link,
        acceptance=pair.acceptance,
        trace=TraceSpec(
            kind="poisson",
            rate=traffic.peak_per_s,
            prompt=traffic.lengths.prompt,
            output=traffic.lengths.output,
        ),
    )
    tally = World(scenario).run(progress)
    rates, ttft_s = np.array(tally.rates), np.array(tally.ttft_s)
    kept, slow, late = 0.0, 0.0, np.inf
    if len(rates) and len(ttft_s):
        # A refused request has not been given what it was promised.
        asked = max(tally.num_arrived, len(ttft_s))
        in_time = float((ttft_s <= target.ttft_s).sum()) / asked
        kept = in_time * float((rates >= target.tokens_per_s).mean())
        slow, late = float(np.percentile(rates, 5)), float(np.percentile(ttft_s, 95))
    return Check(
        offer=offer,
        kept=kept,
        confirmed=kept >= plan.slo.attainment,
        user_tokens_per_s=slow,
        ttft_s=late,
        tokens_per_s=tally.num_tokens / tally.window_s,
    )
