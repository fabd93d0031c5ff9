"""The answer of `dspark plan` as text."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.table import Table
from rich.text import Text

from deploy.simulation.plan_answer import Answer
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
    for offer in found.offers:
        if offer.size is not None:
            table.add_row(offer.way, *_cells(offer))
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
    best = next((offer for offer in found.offers if offer.size is not None), None)
    if best is None:
        yield "infeasible: no way on any of these devices keeps the promise"
    else:
        yield f"best: {_named(best)}, ${best.dollars_per_mtok:.3g} per million tokens"
        for way in sorted(set(WAYS) - {best.way}, key=WAYS.index):
            other = found.best(way)
            if other is not None:
                more = other.dollars_per_hour / best.dollars_per_hour - 1
                yield f"next: {_named(other)}, {more:.0%} more"
    for one in found.checks:
        kept = "kept" if one.kept >= slo.attainment else "BROKEN"
        yield (
            f"by events, {one.way}: promise {kept} ({one.kept:.1%}); 5th percentile "
            f"{one.user_tokens_per_s:.0f} tokens/s, TTFT p95 {one.ttft_s:.2f} s"
        )
    for cost in found.trace:
        yield (
            f"over the trace, {cost.way}: ${cost.dollars_per_mtok:.3g} per million tokens with "
            f"pools of one size, ${cost.scaled_dollars_per_mtok:.3g} if they followed the load; "
            f"promise kept for {cost.attainment:.1%}"
        )
    for offer in found.offers:
        if offer.size is None:
            drafter = f", drafters on {offer.drafter}" if offer.drafter else ""
            yield f"not possible: {offer.way} on {offer.verifier}{drafter}: {offer.reason}"
    for device in found.plan.devices:
        yield f"step times of {device.name}: {device.source}"


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
        f"{offer.dollars_per_mtok:.3f}",
        f"{state.attainment:.1%}",
        f"{slow:.0f}",
        f"{middle:.0f}",
        f"{state.ttft_s[1]:.2f} s",
        f"{state.verifier_busy:.0%} {state.drafter_busy:.0%}",
    ]


def _named(offer: Offer) -> str:
    assert offer.size is not None
    own = (
        f", {_counted(offer.size.drafters, 'drafter')} on {offer.drafter}" if offer.drafter else ""
    )
    verifiers = _counted(offer.size.verifiers, "verifier")
    return f"{offer.way}: {verifiers} on {offer.verifier}{own}, ${offer.dollars_per_hour:.2f}/h"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
