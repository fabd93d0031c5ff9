"""An offer played by events: the real lanes on the pools that the rate model proposed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cluster.config import RouterConfig
from deploy.simulation.plan import PlanSpec, Traffic
from deploy.simulation.plan_kinds import Kind
from deploy.simulation.plan_search import Offer
from deploy.simulation.scenario import Scenario
from deploy.simulation.traces import TraceSpec
from deploy.simulation.world import World

_WARMUP_S = 10.0
_MOST_QUEUED = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Check:
    """What the events say of an offer."""

    way: str
    kept: float
    """Share of requests that met both targets, taken as independent of each other."""
    user_tokens_per_s: float
    """5th percentile over requests."""
    ttft_s: float
    """95th percentile."""
    tokens_per_s: float


def check(offer: Offer, kind: Kind, plan: PlanSpec, traffic: Traffic, seconds: float) -> Check:
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
    tally = World(scenario).run()
    rates, ttft_s = np.array(tally.rates), np.array(tally.ttft_s)
    if not len(rates) or not len(ttft_s):
        return Check(
            way=offer.way, kept=0.0, user_tokens_per_s=0.0, ttft_s=np.inf, tokens_per_s=0.0
        )
    # A refused request has not been given what it was promised.
    asked = max(tally.num_arrived, len(ttft_s))
    in_time = float((ttft_s <= target.ttft_s).sum()) / asked
    return Check(
        way=offer.way,
        kept=in_time * float((rates >= target.tokens_per_s).mean()),
        user_tokens_per_s=float(np.percentile(rates, 5)),
        ttft_s=float(np.percentile(ttft_s, 95)),
        tokens_per_s=tally.num_tokens / tally.window_s,
    )
