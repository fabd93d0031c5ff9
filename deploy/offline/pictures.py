"""Pictures of an evaluation report, for the paper's Table 1 and Figures 2, 5 and 6, and more.

Needs matplotlib (extra ``train``). Everything is drawn from the report alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from io import BytesIO
from typing import Any, Final

from deploy.offline.figures import Figure
from deploy.offline.report import Report
from deploy.offline.round_table import ALL

_COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")
"""Okabe and Ito's, which the colour-blind can tell apart."""
_DPI: Final = 130
_FEWEST_DRAFTS: Final = 20
"""A share of fewer verified drafts is not drawn."""


def draw_report(report: Report) -> dict[str, bytes]:
    """PNG files by the ending of their name; pictures without data are left out."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        # Names are shown as they are; boxes stand for letters that the font does not have.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        return _draw(report)


def _draw(report: Report) -> dict[str, bytes]:
    pictures = {
        "lengths": _lengths(report),
        "positions": _positions(report),
        "depths": _depths(report),
        "batches": _batches(report),
    }
    for drafter in _values(report["ece"], "drafter"):
        mine = {
            name: [f for f in value if f["drafter"] == drafter]
            for name, value in report.items()
            if name in ("thresholds", "reliability", "ece", "auc")
        }
        suffix = _short(drafter, _values(report["ece"], "drafter")).replace("/", "_")
        pictures[f"thresholds-{suffix}"] = _thresholds(drafter, mine)
        pictures[f"reliability-{suffix}"] = _reliability(drafter, mine)
    return {name: data for name, data in pictures.items() if data is not None}


def _lengths(report: Report) -> bytes | None:
    """Table 1: accepted length by domain, a bar per drafter, a panel per regime."""
    found = report["domains"]
    regimes, drafters = _regimes(found), _values(found, "drafter")
    if not regimes:
        return None
    domains = _values(found, "domain")
    figure, axes = _panels(1, len(regimes), width=0.55 * len(domains) * len(drafters) + 1.6)
    bar = 0.8 / len(drafters)
    for axis, regime in zip(axes[0], regimes, strict=True):
        for index, drafter in enumerate(drafters):
            rows = {f["domain"]: f for f in _of(found, regime, drafter)}
            at = [
                place + (index - (len(drafters) - 1) / 2) * bar
                for place, domain in enumerate(domains)
                if domain in rows
            ]
            lengths, errors = _lengths_and_errors([rows[d] for d in domains if d in rows])
            axis.bar(
                at,
                lengths,
                bar * 0.94,
                yerr=errors,
                color=_COLOURS[index % len(_COLOURS)],
                error_kw={"elinewidth": 0.8, "ecolor": "#444444"},
                label=_short(drafter, drafters),
            )
            for x, length in zip(at, lengths, strict=True):
                axis.text(x, 0.06, f"{length:.2f}", ha="center", color="white", fontsize=8)
        axis.axhline(1, color="#444444", linewidth=0.8, linestyle=":")
        axis.set(title=_title(regime), ylim=(0, None))
        axis.set_xticks(range(len(domains)), domains)
    axes[0][0].set_ylabel("accepted length, tokens a round")
    return _finish(figure, axes, "Accepted length, bonus token included (95% intervals)")


def _positions(report: Report) -> bytes | None:
    """Figure 2: conditional acceptance by position, a row per regime, a column per domain."""
    found = report["positions"]
    regimes, domains = _regimes(found), _values(found, "domain")
    if not regimes:
        return None
    drafters = _values(found, "drafter")
    figure, axes = _panels(len(regimes), len(domains), width=2.9, height=2.4)
    for row, regime in zip(axes, regimes, strict=True):
        for axis, domain in zip(row, domains, strict=True):
            for index, drafter in enumerate(drafters):
                mine = [f for f in _of(found, regime, drafter) if f["domain"] == domain]
                at = [f["position"] for f in mine]
                colour = _COLOURS[index % len(_COLOURS)]
                axis.plot(
                    at,
                    [f["acceptance"] for f in mine],
                    "o-",
                    markersize=4,
                    color=colour,
                    label=_short(drafter, drafters),
                )
                known = [f if f["low"] is not None else _around(f["acceptance"]) for f in mine]
                low, high = [f["low"] for f in known], [f["high"] for f in known]
                axis.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
            axis.set(ylim=(0, 1.02), title=f"{domain}, {_title(regime)}")
            axis.set_xticks(range(1, max(f["position"] for f in found) + 1))
        row[0].set_ylabel("accepted if reached")
    for axis in axes[-1]:
        axis.set_xlabel("position in the block")
    return _finish(figure, axes, "Conditional acceptance by position")


def _depths(report: Report) -> bytes | None:
    """Accepted length against the anchor's position."""
    buckets = sorted({(f["from"], f["to"]) for f in report["depths"]}, key=lambda bucket: bucket[0])
    names = {low: f"{low}-{high - 1}" if high else f"{low}-" for low, high in buckets}
    return _over(
        [figure | {"at": names[figure["from"]]} for figure in report["depths"]],
        list(names.values()),
        "context depth, tokens",
        "Accepted length against depth",
    )


def _batches(report: Report) -> bytes | None:
    """Accepted length against the drafter's batch."""
    sizes = sorted({figure["draft_batch"] for figure in report["batches"]})
    return _over(
        [figure | {"at": str(figure["draft_batch"])} for figure in report["batches"]],
        [str(size) for size in sizes],
        "most blocks drafted at once",
        "Accepted length against the drafter's batch size",
    )


def _over(found: Sequence[Figure], places: list[str], label: str, title: str) -> bytes | None:
    """Accepted length at named places in a row, a panel per regime."""
    regimes, drafters = _regimes(found), _values(found, "drafter")
    if not regimes:
        return None
    figure, axes = _panels(1, len(regimes), width=max(3.8, 0.75 * len(places)))
    for axis, regime in zip(axes[0], regimes, strict=True):
        for index, drafter in enumerate(drafters):
            rows = _of(found, regime, drafter)
            lengths, errors = _lengths_and_errors(rows)
            axis.errorbar(
                [places.index(row["at"]) for row in rows],
                lengths,
                yerr=errors,
                fmt="o-",
                markersize=4,
                capsize=2,
                color=_COLOURS[index % len(_COLOURS)],
                label=_short(drafter, drafters),
            )
        axis.set(title=_title(regime), xlabel=label, ylim=(1, None))
        axis.set_xticks(range(len(places)), places, fontsize=8)
    axes[0][0].set_ylabel("accepted length")
    return _finish(figure, axes, f"{title} (95% intervals)")


def _thresholds(drafter: str, found: dict[str, list[Figure]]) -> bytes | None:
    """Figure 5: acceptance of the drafts that pass a threshold, and what is left of the length."""
    regimes = _regimes(found["thresholds"])
    if not regimes:
        return None
    figure, axes = _panels(2, len(regimes), width=3.8, height=2.5)
    for column, regime in enumerate(regimes):
        rows = [f for f in found["thresholds"] if _regime(f) == regime]
        for index, domain in enumerate(_values(rows, "domain")):
            mine = [f for f in rows if f["domain"] == domain]
            colour = "black" if domain == ALL else _COLOURS[index % len(_COLOURS)]
            style = {"color": colour, "label": domain}
            known = [f for f in mine if f["verified"] >= _FEWEST_DRAFTS]
            axes[0][column].plot(
                [f["threshold"] for f in known], [f["acceptance"] for f in known], **style
            )
            axes[1][column].plot(
                [f["threshold"] for f in mine], [f["accepted_length"] for f in mine], **style
            )
        axes[0][column].set(title=_title(regime), ylim=(0, 1.02))
        axes[1][column].set(xlabel="least survival to be verified", ylim=(1, None))
    axes[0][0].set_ylabel("share of verified accepted")
    axes[1][0].set_ylabel("accepted length")
    return _finish(figure, axes, f"{drafter}: confidence threshold")


def _reliability(drafter: str, found: dict[str, list[Figure]]) -> bytes | None:
    """Figure 6: stated against observed survival, a row per regime, a column per position."""
    regimes = _regimes(found["reliability"])
    if not regimes:
        return None
    positions = sorted({f["position"] for f in found["reliability"]})
    figure, axes = _panels(len(regimes), len(positions), width=2.3, height=2.4)
    for row, regime in zip(axes, regimes, strict=True):
        for axis, position in zip(row, positions, strict=True):
            axis.plot([0, 1], [0, 1], color="#888888", linewidth=0.8, linestyle=":")
            for bins in _at(found["reliability"], regime, position):
                axis.plot(bins["stated"], bins["observed"], "o-", markersize=3, color=_COLOURS[0])
            for value in _at(found["ece"], regime, position):
                note = f"ECE {value['survival']:.3f}"
                for area in _at(found["auc"], regime, position):
                    if area["survival"] is not None:
                        note += f"\nAUC {area['survival']:.2f}"
                axis.text(0.05, 0.94, note, va="top", fontsize=8, transform=axis.transAxes)
            axis.set(xlim=(0, 1), ylim=(0, 1), title=f"position {position}")
            axis.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
            axis.set_aspect("equal")
        row[0].set_ylabel(f"{_title(regime)}\nsurvived")
    for axis in axes[-1]:
        axis.set_xlabel("stated survival")
    return _finish(figure, axes, f"{drafter}: reliability of survival")


# --- shared by the pictures -----------------------------------------------------------------------


def _panels(rows: int, columns: int, *, width: float, height: float = 3.2) -> tuple[Any, Any]:
    """A figure and its axes [rows][columns]; sizes in inches a panel."""
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(max(width * columns, 5.0), height * rows + 0.9), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey="row")
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_fontsize(10)
    return figure, axes


def _finish(figure: Any, axes: Any, title: str) -> bytes:
    """Title, one legend for all panels below them, and the PNG."""
    figure.suptitle(title)
    entries: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if entries:
        figure.legend(
            entries.values(), entries.keys(), loc="outside lower center", ncols=4, frameon=False
        )
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()


def _lengths_and_errors(rows: Sequence[Figure]) -> tuple[list[float], list[list[float]]]:
    """Heights, and how far their intervals reach below and above; 0 where there is none."""
    lengths = [row["accepted_length"] for row in rows]
    known = [row if row["low"] is not None else _around(row["accepted_length"]) for row in rows]
    below = [max(length - row["low"], 0.0) for length, row in zip(lengths, known, strict=True)]
    above = [max(row["high"] - length, 0.0) for length, row in zip(lengths, known, strict=True)]
    return lengths, [below, above]


def _around(value: float) -> Figure:
    """An interval without width, to draw none."""
    return {"low": value, "high": value}


def _values(found: Iterable[Figure], name: str) -> list[str]:
    return list(dict.fromkeys(figure[name] for figure in found))


def _regime(figure: Figure) -> tuple[float, str]:
    return figure["temperature"], figure["mode"]


def _regimes(found: Iterable[Figure]) -> list[tuple[float, str]]:
    return list(dict.fromkeys(map(_regime, found)))


def _of(found: Iterable[Figure], regime: tuple[float, str], drafter: str) -> list[Figure]:
    return [f for f in found if _regime(f) == regime and f["drafter"] == drafter]


def _at(found: Iterable[Figure], regime: tuple[float, str], position: int) -> list[Figure]:
    return [f for f in found if _regime(f) == regime and f["position"] == position]


def _title(regime: tuple[float, str]) -> str:
    temperature, mode = regime
    return "greedy" if temperature == 0 else f"T={temperature:g}, {mode}"


def _short(drafter: str, drafters: Sequence[str]) -> str:
    """The last part of a folder's path, where that tells the drafters apart."""
    last = [name.rstrip("/").rsplit("/", 1)[-1] for name in drafters]
    mine = drafter.rstrip("/").rsplit("/", 1)[-1]
    return mine if last.count(mine) == 1 else drafter
