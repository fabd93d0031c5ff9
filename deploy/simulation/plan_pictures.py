"""Pictures of a plan, drawn from its report alone. Needs matplotlib (extra ``train``)."""

from __future__ import annotations

from io import BytesIO
from typing import Any, Final

from deploy.simulation.plan_kinds import COLOCATED, DISAGGREGATED, PLAIN

_COLOURS: Final = {DISAGGREGATED: "#0072B2", COLOCATED: "#E69F00", PLAIN: "#009E73"}
"""Okabe and Ito's, which the colour-blind can tell apart."""
_DPI: Final = 130


def draw_plan(report: dict[str, Any]) -> bytes:
    """A PNG: what a million tokens costs against load, and what the pools cost an hour."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):
        return _draw(report)


def _draw(report: dict[str, Any]) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    loads = report["loads"]
    for way, offers in report["costs"].items():
        colour = _COLOURS[way]
        for axis, key in ((left, "dollars_per_mtok"), (right, "dollars_per_hour")):
            there = [
                (load, offer[key])
                for load, offer in zip(loads, offers, strict=True)
                if offer[key] is not None
            ]
            if not there:
                axis.plot([], [], color=colour, label=f"{way}: not possible")
                continue
            first = next(offer for offer in offers if offer["size"] is not None)
            drafter = f" + {first['drafter']}" if first["drafter"] else ""
            axis.plot(
                *zip(*there, strict=True),
                "o-",
                color=colour,
                markersize=4,
                label=f"{way}: {first['verifier']}{drafter}",
            )
    for axis in (left, right):
        axis.axvline(report["traffic"]["peak_per_s"], color="#444444", linewidth=0.8, linestyle=":")
        axis.set(xscale="log", xlabel="requests per second")
        axis.set_xticks(loads, [f"{load:g}" for load in loads], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3, linewidth=0.5)
        axis.legend(fontsize=8)
    left.set(ylabel="dollars per million tokens", ylim=(0, None))
    right.set(ylabel="dollars per hour", yscale="log")
    for which in (right.yaxis.set_major_formatter, right.yaxis.set_minor_formatter):
        which(lambda value, _: f"{value:g}")
    figure.suptitle(report["title"] or "plan")
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()
