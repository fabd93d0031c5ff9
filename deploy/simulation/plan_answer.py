"""The answer of `dspark plan`: what to rent, and what a million tokens then costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from deploy.simulation.plan import PlanSpec, Traffic, traffic_of
from deploy.simulation.plan_check import Check, Progress, confirm
from deploy.simulation.plan_kinds import WAYS, kinds_of
from deploy.simulation.plan_search import KindSearch, Offer, dollars_per_mtok

LOADS: Final = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Of the load asked about: where costs are compared besides."""
_SEARCH: Final = 0.4
"""Of the whole work, as progress is shown ..."""
_COSTS: Final = 0.3
"""... and, of each way's, what comes behind the events."""


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
    """Offers that were played by events, if that was asked for: way by way, the cheapest first."""
    checked: bool
    """Whether it was."""

    def best(self, way: str) -> Offer | None:
        """The cheapest offer of a way: by the events, if they were asked, else by the rate model;
        None if none keeps the promise."""
        if self.checked:
            return next((c.offer for c in self.checks if c.offer.way == way and c.confirmed), None)
        return next((o for o in self.offers if o.way == way and o.size is not None), None)

    def recommended(self) -> list[Offer]:
        """The best offer of each way, the cheapest first."""
        best = [offer for offer in map(self.best, WAYS) if offer is not None]
        return sorted(best, key=lambda offer: offer.dollars_per_hour)

    def check_of(self, offer: Offer) -> Check | None:
        """What the events say of it, None if they were not asked."""
        return next((check for check in self.checks if check.offer == offer), None)


def answer(
    plan: PlanSpec, progress: Progress = lambda share, what: None, *, check_s: float = 0.0
) -> Answer:
    """Search all ways and kinds.

    Args:
        check_s: play the cheapest offers of each way by events for so long, until one is confirmed;
            0 for not at all.

    Raises:
        ConfigError: a profile or trace that cannot be read.
    """
    traffic = traffic_of(plan.traffic)
    kinds = kinds_of(plan, traffic)
    searches = []
    for kind in kinds:
        progress(0.0, f"{kind.way}, {kind.verifier.name}")
        searches.append(KindSearch(kind, plan))
        searches[-1].offer(traffic.peak_per_s)
        progress(_SEARCH / len(kinds), "")
    ways = [way for way in WAYS if any(kind.way == way for kind in kinds)]
    costs, days, checks = {}, [], []
    for way in ways:
        own = [search for search in searches if search.kind.way == way]
        told = _scaled(progress, (1 - _SEARCH) / len(ways))
        if check_s:
            checks += confirm(own, plan, traffic, check_s, _scaled(told, 1 - _COSTS))
        else:
            told(1 - _COSTS, f"{way}, costs by load")
        offer, search = min(
            ((one.offer(traffic.peak_per_s), one) for one in own),
            key=lambda pair: pair[0].dollars_per_hour,
        )
        costs[way] = tuple(search.offer(share * traffic.peak_per_s) for share in LOADS)
        if len(traffic.windows_per_s) > 1 and offer.size is not None:
            days.append(_trace_cost(search, offer, traffic))
        told(_COSTS, "")
    offers = [search.offer(traffic.peak_per_s) for search in searches]
    return Answer(
        plan=plan,
        traffic=traffic,
        offers=tuple(sorted(offers, key=lambda o: (o.dollars_per_hour, WAYS.index(o.way)))),
        costs=costs,
        trace=tuple(days),
        checks=tuple(checks),
        checked=check_s > 0,
    )


def _scaled(progress: Progress, share: float) -> Progress:
    """Of a part of the work."""
    return lambda part, what: progress(share * part, what)


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
        "recommended": [asdict(offer) for offer in found.recommended()],
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
