"""An evaluation report for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from deploy.offline.confidence_figures import POOLED
from deploy.offline.figures import Figure
from deploy.offline.report import Report
from deploy.offline.round_table import ALL

_SHOWN_THRESHOLDS = (0.0, 0.2, 0.4, 0.6, 0.8)


def report_tables(report: Report) -> Iterator[Table]:
    """The report's figures, the headline first."""
    for regime in _regimes(report["domains"]):
        yield _lengths(report, regime)
    if report["comparisons"]:
        yield _comparisons(report["comparisons"])
    if report["positions"]:
        yield _positions(report["positions"])
    if report["ece"]:
        yield _confidence(report)
        yield _thresholds(report["thresholds"])
    if report["depths"]:
        yield _depths(report["depths"])
    if report["batches"]:
        yield _batches(report["batches"])


def _lengths(report: Report, regime: str) -> Table:
    """Accepted length: data sets below each other by domain, drafters side by side."""
    rows = [f for f in report["rows"] if _regime(f) == regime]
    domains = [f for f in report["domains"] if _regime(f) == regime]
    drafters = _drafters(domains)
    title = f"Accepted length, {regime} (95% interval)"
    table = _plain(title)
    for column in ("domain", "data set", "prompts"):
        table.add_column(column, justify="right" if column == "prompts" else "left")
    for drafter in drafters:
        table.add_column(Text(drafter), justify="right", overflow="fold")
    for domain in dict.fromkeys(f["domain"] for f in domains):
        mine = [f for f in rows if f["domain"] == domain]
        for source in dict.fromkeys(f["source"] for f in mine):
            _add(table, domain, source, [f for f in mine if f["source"] == source], drafters)
        total = "" if domain == ALL else "all of it"
        _add(table, domain, total, [f for f in domains if f["domain"] == domain], drafters, "bold")
        table.add_section()
    return table


def _add(
    table: Table,
    domain: str,
    source: str,
    found: Sequence[Figure],
    drafters: Sequence[str],
    style: str = "",
) -> None:
    cells = {f["drafter"]: _length(f) for f in found}
    num_prompts = max(f["prompts"] for f in found)
    table.add_row(
        Text(domain),
        Text(source),
        str(num_prompts),
        *(cells.get(d, "-") for d in drafters),
        style=style,
    )


def _comparisons(found: Sequence[Figure]) -> Table:
    """Each drafter over the first, domains side by side."""
    domains = list(dict.fromkeys(f["domain"] for f in found))
    title = f"Accepted length over that of {found[0]['over']} (95% interval)"
    table = _by_run(title, domains)
    for regime, rows in _rows(table, found):
        cells = {f["domain"]: _with_interval(f["quotient"], f) for f in rows}
        table.add_row(regime, *(cells.get(domain, "-") for domain in domains))
    return table


def _positions(found: Sequence[Figure]) -> Table:
    """Conditional acceptance, all domains together."""
    found = [f for f in found if f["domain"] == ALL]
    table = _by_run("Share accepted of the drafts reached, by position", _positions_of(found))
    for regime, rows in _rows(table, found):
        table.add_row(regime, *(f"{f['acceptance']:.2f}" for f in rows))
    return table


def _confidence(report: Report) -> Table:
    """Of survival: ECE by position, the worst of them, pooled AUC, mean Brier score."""
    positions = _positions_of(report["ece"])
    title = "Confidence (survival): ECE in percent, by position"
    table = _by_run(title, [*positions, "worst", "AUC", "Brier"])
    areas = {_run(f): f["survival"] for f in report["auc"] if f["position"] == POOLED}
    scores: dict[tuple[str, str], list[float]] = {}
    for figure in report["brier"]:
        scores.setdefault(_run(figure), []).append(figure["survival"])
    for regime, rows in _rows(table, report["ece"]):
        errors = [f["survival"] for f in rows]
        area, score = areas.get(_run(rows[0])), scores[_run(rows[0])]
        table.add_row(
            regime,
            *map(_percent, errors),
            *[""] * (len(positions) - len(errors)),
            _percent(max(errors)),
            "-" if area is None else f"{area:.2f}",
            f"{sum(score) / len(score):.3f}",
        )
    return table


def _thresholds(found: Sequence[Figure]) -> Table:
    """Acceptance of verified drafts and accepted length at a few thresholds, all domains."""
    table = _by_run(
        "Only drafts of this survival verified: share accepted, accepted length",
        [f"{threshold:g}" for threshold in _SHOWN_THRESHOLDS],
    )
    shown = [f for f in found if f["domain"] == ALL and f["threshold"] in _SHOWN_THRESHOLDS]
    for regime, rows in _rows(table, shown):
        shares = ["-" if f["acceptance"] is None else f"{f['acceptance']:.0%}" for f in rows]
        lengths = [f"{f['accepted_length']:.2f}" for f in rows]
        table.add_row(regime, *(" ".join(pair) for pair in zip(shares, lengths, strict=True)))
    return table


def _depths(found: Sequence[Figure]) -> Table:
    starts = sorted({f["from"] for f in found})
    table = _by_run("Accepted length by context depth, from", [str(start) for start in starts])
    for regime, rows in _rows(table, found):
        cells = {f["from"]: f"{f['accepted_length']:.2f}" for f in rows}
        table.add_row(regime, *(cells.get(start, "-") for start in starts))
    return table


def _batches(found: Sequence[Figure]) -> Table:
    sizes = sorted({f["draft_batch"] for f in found})
    title = "Accepted length by most blocks drafted at once (95% interval)"
    table = _by_run(title, [str(size) for size in sizes])
    for regime, rows in _rows(table, found):
        cells = {f["draft_batch"]: _length(f) for f in rows}
        table.add_row(regime, *(cells.get(size, "-") for size in sizes))
    return table


def _plain(title: str) -> Table:
    """Without lines between columns: ten of them fit in 80 places."""
    return Table(
        title=Text(title, style="table.title"),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title_justify="left",
    )


def _by_run(title: str, columns: Sequence[str]) -> Table:
    """A table for `_rows`: a line per run, drafter by drafter."""
    table = _plain(title)
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(Text(column), justify="right")
    return table


def _rows(table: Table, found: Iterable[Figure]) -> Iterator[tuple[str, list[Figure]]]:
    """Regime and figures of each run; heads the runs of a drafter with its name."""
    runs: dict[tuple[str, str], list[Figure]] = {}
    for figure in found:
        runs.setdefault(_run(figure), []).append(figure)
    last = None
    for (drafter, regime), figures in runs.items():
        if drafter != last:
            table.add_row(Text(drafter, style="bold"))
        last = drafter
        yield f"  {regime}", figures


def _positions_of(found: Iterable[Figure]) -> list[str]:
    return [str(position) for position in sorted({f["position"] for f in found})]


def _length(figure: Figure) -> str:
    return _with_interval(figure["accepted_length"], figure)


def _with_interval(value: float, figure: Figure) -> str:
    """A value and, if there were prompts enough to tell, its interval."""
    if figure["low"] is None:
        return f"{value:.2f}"
    return f"{value:.2f} [{figure['low']:.2f}, {figure['high']:.2f}]"


def _percent(share: float) -> str:
    """In at most three characters."""
    return f"{100 * share:.1f}" if share < 0.0995 else f"{100 * share:.0f}"


def _run(figure: Figure) -> tuple[str, str]:
    return figure["drafter"], _regime(figure)


def _regime(figure: Figure) -> str:
    if figure["temperature"] == 0:
        return "greedy"
    return f"T={figure['temperature']:g}, {figure['mode']}"


def _regimes(found: Iterable[Figure]) -> list[str]:
    return list(dict.fromkeys(map(_regime, found)))


def _drafters(found: Iterable[Figure]) -> list[str]:
    return list(dict.fromkeys(figure["drafter"] for figure in found))
