"""The answer of `dspark plan` as text."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.table import Table
from rich.text import Text

from deploy.simulation.plan_answer import Answer
from deploy.simulation.plan_check import Check
from deploy.simulation.plan_kinds import COLOCATED, PLAIN, WAYS
from deploy.simulation.plan_search import Offer


def answer_table(found: Answer) -> Table:
    """One line for every way and kind of devices, the cheapest first."""
    table = Table(
        title=Text(found.plan.title or "plan", style="table.title"),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title_justify="left",
    )
    for name in ("drafting", "verifiers", "drafters"):
        table.add_column(name, no_wrap=True)
    for name in ("$/h", "$/M tokens", "kept", "tok/s p5", "p50", "TTFT p95", "busy V D"):
        table.add_column(name, justify="right")
    if found.checked:
        table.add_column("kept, events", justify="right")
    for offer in found.offers:
        if offer.size is not None:
            check = found.check_of(offer)
            events = [f"{check.kept:.1%}" if check else "-"] if found.checked else []
            table.add_row(offer.way, *_cells(offer), *events)
    return table


def sentences(found: Answer) -> Iterator[str]:
    """What it was asked, what is best, and why the rest is not possible."""
    traffic, slo = found.traffic, found.plan.slo
    rate = slo.target.tokens_per_s
    busiest = "in the busiest window" if len(traffic.windows_per_s) > 1 else "of Poisson arrivals"
    promise = f"first token within {slo.ttft_s:g} s"
    if rate:
        promise += f" and {rate:g} tokens/s per user"
    yield (
        f"{traffic.peak_per_s:g} requests/s {busiest}, {traffic.lengths.prompt.mean:.0f} + "
        f"{traffic.lengths.output.mean:.0f} tokens; {promise}, for {slo.attainment:.0%}"
    )
    yield from _recommendation(found)
    for cost in found.trace:
        yield (
            f"over the trace, {cost.way}: {_per_mtok(cost.dollars_per_mtok)} per million tokens "
            f"with pools of one size, {_per_mtok(cost.scaled_dollars_per_mtok)} if they followed "
            f"the load; "
            f"promise kept for {cost.attainment:.1%}"
        )
    for offer in found.offers:
        if offer.size is None:
            drafter = f", drafters on {offer.drafter}" if offer.drafter else ""
            yield f"not possible: {offer.way} on {offer.verifier}{drafter}: {offer.reason}"
    for device in found.plan.devices:
        yield f"step times of {device.name}: {device.source}"


def _recommendation(found: Answer) -> Iterator[str]:
    """The best offer, the best of the other ways, and what the events say."""
    promised = found.plan.slo.attainment
    for way in WAYS:
        checks = [check for check in found.checks if check.offer.way == way]
        for check in checks:
            if not check.confirmed:
                yield f"refuted by events: {_priced(check.offer)}: kept for {_kept(check)}"
        if checks and not checks[-1].confirmed:
            yield f"{way}: none of the {len(checks)} cheapest offers was confirmed by events"
    offers = found.recommended()
    if not offers:
        if not any(offer.size for offer in found.offers) and not found.checks:
            yield "infeasible: no way on any of these devices keeps the promise"
        else:
            yield f"no offer was confirmed by events to keep the promise for {promised:.0%}"
        return
    best = offers[0]
    yield f"best: {_priced(best)}, {_per_mtok(best.dollars_per_mtok)} per million tokens"
    if (played := found.check_of(best)) is not None:
        yield f"confirmed by events: kept for {_kept(played)}"
    for other in offers[1:]:
        more = other.dollars_per_hour / best.dollars_per_hour - 1
        seen = found.check_of(other)
        events = f"; by events, kept for {_kept(seen)}" if seen else ""
        yield f"next: {_priced(other)}, {more:.0%} more{events}"


def _kept(check: Check) -> str:
    return (
        f"{check.kept:.1%} (5th percentile {check.user_tokens_per_s:.0f} tokens/s, TTFT p95 "
        f"{check.ttft_s:.2f} s)"
    )


def _per_mtok(dollars: float) -> str:
    """As the table has it."""
    return f"${dollars:.3f}"


def _cells(offer: Offer) -> list[str]:
    size, state = offer.size, offer.state
    assert size is not None
    assert state is not None
    slow, middle, _ = state.user_tokens_per_s
    drafters = {PLAIN: "-", COLOCATED: "on the verifiers"}.get(
        offer.way, f"{size.drafters} {offer.drafter}"
    )
    return [
        f"{size.verifiers} {offer.verifier}",
        drafters,
        f"{offer.dollars_per_hour:.2f}",
        _per_mtok(offer.dollars_per_mtok).removeprefix("$"),
        f"{state.attainment:.1%}",
        f"{slow:.0f}",
        f"{middle:.0f}",
        f"{state.ttft_s[1]:.2f} s",
        f"{state.verifier_busy:.0%} {state.drafter_busy:.0%}",
    ]


def _priced(offer: Offer) -> str:
    return f"{offer.name}, ${offer.dollars_per_hour:.2f}/h"
