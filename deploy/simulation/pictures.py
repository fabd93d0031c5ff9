"""Pictures of a simulation, drawn from its report alone. Needs matplotlib (extra ``train``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any, Final

import numpy as np

Row = dict[str, Any]

_COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")
"""Okabe and Ito's, which the colour-blind can tell apart."""
_DPI: Final = 130
_SMOOTH: Final = 4
"""Bins of the time line in one point of its picture."""


def draw_report(report: dict[str, Any]) -> dict[str, bytes]:
    """PNG files by name: ``frontier``, ``budget``, ``utilisation`` and ``latency`` over the points
    of a sweep, ``timeline`` of the runs at its last point."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):
        return {
            "frontier": _frontier(report),
            "budget": _budget(report),
            "utilisation": _utilisation(report),
            "latency": _latency(report),
            "timeline": _timeline(report),
        }


def _frontier(report: dict[str, Any]) -> bytes:
    """Total throughput against what one user sees (paper Figure 7), loads as numbers."""
    figure, (axis,) = _panels(1, width=7.0)
    for name, colour, rows in _variants(report):
        speed = [row["figures"]["user_tokens_per_s"]["mean"] for row in rows]
        total = [row["figures"]["tokens_per_s"] for row in rows]
        axis.plot(speed, total, "o-", markersize=5, color=colour, label=name)
        for row, x, y in zip(rows, speed, total, strict=True):
            if row["point"] is not None and x is not None:
                place = {"textcoords": "offset points", "xytext": (5, 4), "fontsize": 7}
                axis.annotate(f"{row['point']:g}", (x, y), color=colour, **place)
    axis.set(xlabel="tokens/s of one user, mean", ylabel="tokens/s in all", ylim=(0, None))
    axis.set_xlim(0, None)
    return _finish(figure, [axis], f"{report['title']}: throughput against speed")


def _budget(report: dict[str, Any]) -> bytes:
    """Tokens verified per request and round, and tokens gained, against load (Figure 8)."""
    figure, axes = _panels(2)
    for name, colour, rows in _variants(report):
        for axis, key in zip(axes, ("budget", "accepted_length"), strict=True):
            _line(axis, rows, lambda f, key=key: f[key], colour, name)  # type: ignore[misc]
    axes[0].set(ylabel="tokens to the target per request and step", ylim=(0, None))
    axes[1].set(ylabel="tokens gained per request and step", ylim=(0, None))
    return _finish(figure, axes, f"{report['title']}: verify budget")


def _utilisation(report: dict[str, Any]) -> bytes:
    """Share of time that each pool is at work."""
    figure, axes = _panels(2)
    for name, colour, rows in _variants(report):
        for axis, key in zip(axes, ("verifier_busy", "drafter_busy"), strict=True):
            _line(axis, rows, lambda f, key=key: f[key], colour, name)  # type: ignore[misc]
    for axis, pool in zip(axes, ("verifiers", "drafters"), strict=True):
        axis.set(ylabel=f"share of time busy, {pool}", ylim=(0, 1.02))
    return _finish(figure, axes, f"{report['title']}: utilisation")


def _latency(report: dict[str, Any]) -> bytes:
    """Medians as lines, 95th and 99th percentiles as dashes and dots."""
    figure, axes = _panels(2)
    for name, colour, rows in _variants(report):
        for axis, key in zip(axes, ("ttft_s", "itl_s"), strict=True):
            for percentile, style in (("p50", "o-"), ("p95", "--"), ("p99", ":")):
                label = f"{name} {percentile}"
                _line(
                    axis,
                    rows,
                    lambda f, key=key, p=percentile: f[key][p],  # type: ignore[misc]
                    colour,
                    label,
                    style,
                )
    axes[0].set(ylabel="time to first token, s", yscale="log")
    axes[1].set(ylabel="between emissions, s", yscale="log")
    for axis in axes:
        _plain_ticks(axis.yaxis)
    return _finish(figure, axes, f"{report['title']}: latency")


def _timeline(report: dict[str, Any]) -> bytes:
    """Throughput, budget and step time, predicted and real, over the run."""
    figure, axes = _panels(3)
    point = report["rows"][-1]["point"]
    for name, colour, rows in _variants(report):
        for row in rows:
            if row["point"] == point:
                _timelines(axes, row["timeline"], report["duration_s"], colour, name)
    axes[0].set(ylabel="tokens/s", ylim=(0, None))
    axes[1].set(ylabel="tokens to the target per request and step", ylim=(0, None))
    axes[2].set(ylabel="step time, ms (dotted: predicted)", ylim=(0, None))
    for axis in axes:
        axis.set_xlabel("virtual time, s")
        axis.axvspan(0, report["warmup_s"], color="#000000", alpha=0.05, linewidth=0)
    at = "" if point is None else f" at load {point:g}"
    return _finish(figure, axes, f"{report['title']}: over time{at}")


def _timelines(
    axes: Sequence[Any], lines: dict[str, list[float]], duration_s: float, colour: str, name: str
) -> None:
    sums = {key: np.reshape(line, (-1, _SMOOTH)).sum(axis=1) for key, line in lines.items()}
    width_s = duration_s / len(sums["tokens"])
    at = (np.arange(len(sums["tokens"])) + 0.5) * width_s
    with np.errstate(invalid="ignore", divide="ignore"):
        axes[0].plot(at, sums["tokens"] / width_s, color=colour, label=name)
        axes[1].plot(at, 1 + sums["verified"] / sums["rows"], color=colour, label=name)
        axes[2].plot(at, 1e3 * sums["step_s"] / sums["steps"], color=colour, label=name)
        axes[2].plot(at, 1e3 * sums["predicted_s"] / sums["steps"], ":", color=colour)


# --- shared by the pictures -----------------------------------------------------------------------


def _variants(report: dict[str, Any]) -> list[tuple[str, str, list[Row]]]:
    """Name, colour and runs of each."""
    names = list(dict.fromkeys(row["variant"] for row in report["rows"]))
    return [
        (
            name,
            _COLOURS[index % len(_COLOURS)],
            [row for row in report["rows"] if row["variant"] == name],
        )
        for index, name in enumerate(names)
    ]


def _line(
    axis: Any,
    rows: Sequence[Row],
    value: Callable[[Row], float | None],
    colour: str,
    label: str,
    style: str = "o-",
) -> None:
    """A figure against the requests that ran at a time."""
    at = [row["figures"]["requests"]["mean_running"] for row in rows]
    values = [np.nan if (v := value(row["figures"])) is None else v for row in rows]
    axis.plot(at, values, style, markersize=4, color=colour, label=label)
    axis.set(xlabel="requests running, mean", xscale="log")
    _plain_ticks(axis.xaxis)


def _plain_ticks(axis: Any) -> None:
    """1, 2, 5, 10 on a logarithmic axis, as numbers: formulas are switched off."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if not np.isfinite(axis.get_minpos()):  # nothing to draw: a logarithm has no place for it
        axis.axes.set(**{f"{axis.axis_name}scale": "linear"})
        return
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _panels(count: int, *, width: float = 4.6) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * count, 4.4), layout="constrained")
    axes = list(figure.subplots(1, count, squeeze=False)[0])
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _finish(figure: Any, axes: Sequence[Any], title: str) -> bytes:
    figure.suptitle(title.removeprefix(": "))
    entries: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=4, frameon=False
    )
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()
