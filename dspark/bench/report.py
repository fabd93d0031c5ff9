"""A measurement as JSON, as a table and as a picture."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from dspark.bench.asks import Mix
from dspark.bench.figures import Figure
from dspark.bench.measure import Measured, Plan
from dspark.messages import Model

_MISSING: Final = "-"


def as_json(
    measured: Measured,
    plan: Plan,
    mix: Mix,
    prompts: Path,
    server: Model,
    scheduling: dict[str, str],
) -> dict[str, Any]:
    """Everything that makes the figures readable later."""
    asked = asdict(mix)
    del asked["prompts"]
    return {
        "load": {
            **{name: value for name, value in asdict(plan).items() if value is not None},
            **{name: value for name, value in asked.items() if value is not None},
            "prompts": prompts.name,
            "num_prompts": len(mix.prompts),
        },
        "server": {
            "model": Path(server.model).name,
            "drafter": server.drafter,
            "version": server.version,
            "verifiers": server.verifiers,
            "drafters": server.drafters,
            "scheduling": scheduling,
        },
        "window_s": measured.window.length_s,
        "figures": measured.figures,
        "counters": measured.counters,
        "client": measured.client,
    }


def tables(figures: Figure, title: str) -> list[Table]:
    """Rates and drafts in one table, latencies in another; a column per domain."""
    sides = {"all": figures, **figures["domains"]}
    if len(sides) == 2:  # one domain is all there is
        sides = {"all": figures}
    return [_rates_table(sides, title), _spread_table(figures)]


def _rates_table(sides: dict[str, Figure], title: str) -> Table:
    table = Table(title=title)
    table.add_column("")
    for name in sides:
        table.add_column(name, justify="right")
    rows = (
        ("tokens/s in all", ("rates", "tokens_per_s_total")),
        ("tokens/s per user", ("rates", "tokens_per_s_user")),
        ("requests at once", ("rates", "mean_concurrency")),
        ("accepted length", ("rates", "accepted_length")),
        ("drafts verified per round", ("drafts", "verified_per_round")),
        ("draft tokens proposed", ("drafts", "proposed")),
        ("draft tokens verified", ("drafts", "verified")),
        ("draft tokens accepted", ("drafts", "accepted")),
        ("requests completed", ("requests", "completed")),
        ("requests unfinished", ("requests", "unfinished")),
        ("target rate attained", ("slo", "attained")),
    )
    for label, path in rows:
        values = [_at(side, path) for side in sides.values()]
        if any(value is not None for value in values):
            table.add_row(label, *map(_text, values))
    for error in sides["all"]["requests"]["errors"]:
        counts = [side["requests"]["errors"].get(error, 0) for side in sides.values()]
        table.add_row(f"ended with {error}", *map(_text, counts))
    return table


def _spread_table(figures: Figure) -> Table:
    table = Table()
    for column in ("", "mean", "p50", "p95", "p99"):
        table.add_column(column, justify="right" if column else "left")
    rows = (
        ("time to first token, s", "ttft_s"),
        ("between messages, s", "inter_message_s"),
        ("between tokens, s", "inter_token_s"),
        ("tokens/s of an answer", "user_tokens_per_s"),
    )
    for label, name in rows:
        values = figures[name] or {}
        table.add_row(label, *(_text(values.get(key)) for key in ("mean", "p50", "p95", "p99")))
    return table


def _at(figure: Figure, path: tuple[str, str]) -> float | None:
    section, name = path
    values: Figure | None = figure[section]
    return None if values is None else values[name]


def _text(value: float | None) -> str:
    if value is None:
        return _MISSING
    return str(value) if isinstance(value, int) else f"{value:.3g}"
