"""The answer of `dspark plan`: what to rent, and what a million tokens then costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from deploy.simulation.plan import PlanSpec, Traffic, traffic_of
from deploy.simulation.plan_check import Check, check
from deploy.simulation.plan_kinds import WAYS, kinds_of
from deploy.simulation.plan_search import KindSearch, Offer, dollars_per_mtok

LOADS: Final = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Of the load asked about: where costs are compared besides."""

Progress = Callable[[float, str], None]
"""Told the share of the whole work that has been done since its last call, and what comes next."""


@dataclass(frozen=True, kw_only=True)
class TraceCost:
    """A recorded day on the pools of an offer."""

    way: str
    dollars_per_mtok: float
    """Pools as large throughout as the busiest window needs."""
    scaled_dollars_per_mtok: float
    """Each window on the cheapest pools that bear it: what scaling could save at most."""
    attainment: float
    """Share of all requests for which the promise is kept, pools as large throughout."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was found."""

    plan: PlanSpec
    traffic: Traffic
    offers: tuple[Offer, ...]
    """At the busiest load, one of every way and kind of devices, the cheapest first."""
    costs: dict[str, tuple[Offer, ...]]
    """By way, as far as there are devices for it: the offers of its best kind at `LOADS`."""
    trace: tuple[TraceCost, ...]
    """Of recorded traffic, for each way that can be had."""
    checks: tuple[Check, ...]
    """Of the best offer of each way, if events were asked for."""

    def best(self, way: str) -> Offer | None:
        """The cheapest offer of a way, None if none keeps the promise."""
        return next((o for o in self.offers if o.way == way and o.size is not None), None)


def answer(
    plan: PlanSpec, progress: Progress = lambda share, what: None, *, check_s: float = 0.0
) -> Answer:
    """Search all ways and kinds.

    Args:
        check_s: play the best offer of each way by events for so long; 0 for not at all.

    Raises:
        ConfigError: a profile or trace that cannot be read.
    """
    traffic = traffic_of(plan.traffic)
    kinds = kinds_of(plan, traffic)
    found = []
    for kind in kinds:
        progress(0.0, f"{kind.way}, {kind.verifier.name}")
        search = KindSearch(kind, plan)
        found.append((search.offer(traffic.peak_per_s), search))
        progress(0.5 / len(kinds), "costs by load")
    found.sort(key=lambda pair: (pair[0].dollars_per_hour, WAYS.index(pair[0].way)))
    costs, days, checks = {}, [], []
    ways = [way for way in WAYS if any(kind.way == way for kind in kinds)]
    for way in ways:
        offer, search = next(pair for pair in found if pair[0].way == way)
        costs[way] = tuple(search.offer(share * traffic.peak_per_s) for share in LOADS)
        if len(traffic.windows_per_s) > 1 and offer.size is not None:
            days.append(_trace_cost(search, offer, traffic))
        if check_s and offer.size is not None:
            progress(0.0, f"{way}, by events")
            checks.append(check(offer, search.kind, plan, traffic, check_s))
        progress(0.5 / len(ways), "costs by load")
    return Answer(
        plan=plan,
        traffic=traffic,
        offers=tuple(offer for offer, _ in found),
        costs=costs,
        trace=tuple(days),
        checks=tuple(checks),
    )


def report_of(found: Answer) -> dict[str, Any]:
    """Everything as the JSON file holds it; null for what there is not."""
    tree = {
        "title": found.plan.title,
        "traffic": asdict(found.traffic),
        "sources": {device.name: device.source for device in found.plan.devices},
        "rows": [asdict(offer) for offer in found.offers],
        "loads": [share * found.traffic.peak_per_s for share in LOADS],
        "costs": {way: [asdict(o) for o in offers] for way, offers in found.costs.items()},
        "trace": [asdict(cost) for cost in found.trace],
        "checks": [asdict(one) for one in found.checks],
        "plan": asdict(found.plan),
    }
    cleaned: dict[str, Any] = _finite(tree)
    return cleaned


def _trace_cost(search: KindSearch, offer: Offer, traffic: Traffic) -> TraceCost:
    deployment = search.kind.deployment
    assert deployment is not None
    assert offer.size is not None
    played = deployment.play(traffic.windows_per_s, interval_s=traffic.window_s, size=offer.size)
    tokens = [interval.state.tokens_per_s for interval in played]
    kept = [interval.state.attainment * interval.state.requests_per_s for interval in played]
    return TraceCost(
        way=offer.way,
        dollars_per_mtok=dollars_per_mtok(offer.dollars_per_hour, _mean(tokens)),
        scaled_dollars_per_mtok=dollars_per_mtok(
            _mean([_scaled_dollars(search, rate) for rate in traffic.windows_per_s]),
            _mean(tokens),
        ),
        attainment=sum(kept) / max(sum(i.state.requests_per_s for i in played), 1e-9),
    )


def _scaled_dollars(search: KindSearch, requests_per_s: float) -> float:
    """Per hour, of the cheapest size that bears a window; loads are rounded up to a twelfth of an
    octave, so that few are looked at."""
    if requests_per_s <= 0:
        return search.offer(1e-6).dollars_per_hour
    return search.offer(2 ** (math.ceil(12 * math.log2(requests_per_s)) / 12)).dollars_per_hour


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _finite(value: Any) -> Any:
    """JSON knows no infinity."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
