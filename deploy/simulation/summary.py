"""The table that a simulation prints. Pure."""

from __future__ import annotations

from typing import Any, Final

from rich.table import Table

_COLUMNS: Final = (
    "load",
    "running",
    "tokens/s",
    "a user",
    "accepted",
    "budget",
    "step ms",
    "error %",
    "TTFT ms",
    "ITL ms",
    "busy %",
)
_CAPTION: Final = (
    "a user: tokens/s of one answer; accepted, budget: tokens per request and step; error: median "
    "of predicted step times; TTFT p95; ITL p99; busy: verifiers / drafters; "
    "-: nothing to count"
)


def summary_table(report: dict[str, Any]) -> Table:
    """One line a run."""
    table = Table(title=report["title"] or None, caption=_CAPTION)
    table.add_column("variant")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for row in report["rows"]:
        f = row["figures"]
        table.add_row(
            row["variant"],
            "" if row["point"] is None else f"{row['point']:g}",
            _text(f["requests"]["mean_running"]),
            _text(f["tokens_per_s"], digits=0),
            _text(f["user_tokens_per_s"]["mean"]),
            _text(f["accepted_length"], digits=2),
            _text(f["budget"], digits=2),
            _text(f["step_s"], 1e3),
            _text(f["step_error"]["p50"], 100),
            _text(f["ttft_s"]["p95"], 1e3, 0),
            _text(f["itl_s"]["p99"], 1e3, 0),
            f"{_text(f['verifier_busy'], 100, 0)} / {_text(f['drafter_busy'], 100, 0)}",
        )
    return table


def _text(value: float | None, factor: float = 1.0, digits: int = 1) -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}"
