"""Tables of throughput profiles and drafter links, as `dspark profile` prints them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from cluster.profile_snapshot import ALARMS, ProfileSnapshot


def tier_table(name: str, profile: ProfileSnapshot) -> Table:
    """The staircase: at start, now, how often each size ran."""
    table = Table(title=f"{name}: seconds of a step by tokens, without rows and context")
    for column in ("tokens", "at start ms", "live ms", "live us/token", "steps"):
        table.add_column(column, justify="right")
    rows = zip(profile.tokens, profile.prior_s, profile.live_s, profile.num_tier_steps, strict=True)
    for tokens, prior_s, live_s, steps in rows:
        table.add_row(
            str(tokens),
            f"{1e3 * prior_s:.2f}",
            f"{1e3 * live_s:.2f}",
            f"{1e6 * live_s / tokens:.0f}",
            str(steps),
        )
    return table


def cost_table(profile: ProfileSnapshot) -> Table:
    """What a step takes beside its tokens."""
    table = Table(title="and what else it costs, in microseconds")
    for column in ("", "at start", "live"):
        table.add_column(column, justify="right" if column else "left")
    prior, live = profile.prior_costs, profile.live_costs
    for label, before_s, now_s in (
        ("per request", prior.row_s, live.row_s),
        ("per position of context", prior.context_s, live.context_s),
        ("per token and position", prior.pair_s, live.pair_s),
        ("per prompt token, against a verify token", prior.prefill_s, live.prefill_s),
    ):
        table.add_row(label, f"{1e6 * before_s:.3g}", f"{1e6 * now_s:.3g}")
    return table


def figures(profile: ProfileSnapshot) -> list[str]:
    """Lines on how good it is."""
    lines = [
        f"measured with: {profile.fingerprint or 'not said'}",
        "no steps yet: nothing is known of how good the predictions are"
        if not profile.num_steps
        else f"{profile.num_steps} steps: predicted times are off by {profile.median_error:.1%} "
        f"(median), {profile.mean_error:.1%} (mean); equal steps differ by {profile.spread:.1%}",
        f"machine now {profile.scale:.2f} times as slow as at start; "
        f"{1e3 * profile.overhead_s:.1f} ms pass between steps",
    ]
    lines += [f"alarm: {name}: {ALARMS.get(name, 'unknown')}" for name in profile.alarms]
    return lines


def link_table(drafters: Sequence[Mapping[str, Any]]) -> Table:
    """Draft times and round trips, by drafter and the router at the other end."""
    table = Table(title="drafter links")
    for column in ("drafter", "router", "sessions", "blocks", "round trip ms"):
        table.add_column(column)
    table.add_column("draft ms, by blocks")
    for link in drafters:
        trip_s = link.get("round_trip_s")
        times = link.get("draft_s") or {}
        table.add_row(
            str(link.get("drafter", "")),
            str(link.get("router", "")),
            str(link.get("sessions", "")),
            str(link.get("num_samples", "")),
            "not known" if trip_s is None else f"{1e3 * trip_s:.1f}",
            ", ".join(f"{n}: {1e3 * seconds:.1f}" for n, seconds in times.items()),
        )
    return table


def gaps(report: Mapping[str, Any]) -> list[str]:
    """Lines on what a server's report does not tell: routers without an answer, and verifiers that
    nobody told of."""
    silent = [
        f"warning: router {item.get('router')} did not answer: {item.get('why')}"
        for item in report.get("unanswered") or []
    ]
    untold = [
        f"warning: nothing known of verifier {item.get('verifier')}: "
        + (f"router {item['router']} leads it" if item.get("router") else "no router leads it")
        for item in report.get("untold") or []
    ]
    return silent + untold
