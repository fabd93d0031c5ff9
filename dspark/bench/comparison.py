"""Blocks of settings summed up: rates per setting and users, paired ratios, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from io import BytesIO
from typing import Any, Final

import numpy as np

from dspark.bench.figures import Figure
from dspark.bench.ratios import paired_ratio

_DPI: Final = 130
_COLOURS: Final = ("#999999", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#0072B2", "#CC79A7")


def rates_by_setting(blocks: Sequence[Figure]) -> list[Figure]:
    """A row per setting and number of users: means over the repeats."""
    rows = []
    for users in crowds(blocks):
        for setting in names(blocks):
            mine = [b for b in blocks if (b["users"], b["setting"]) == (users, setting)]
            if not mine:
                continue
            sums = {
                name: sum(block["counters"].get(name, 0.0) for block in mine)
                for name in ("num_verify_rows", "num_draft_asks", "num_verified", "num_steps")
            }
            verify_rows = sums["num_verify_rows"]
            rows.append(
                {
                    "users": users,
                    "setting": setting,
                    "tokens_per_s_total": _mean(mine, "tokens_per_s_total"),
                    "tokens_per_s_user": _mean(mine, "tokens_per_s_user"),
                    "accepted_length": _mean(mine, "accepted_length"),
                    "verified_per_round": _over(sums["num_verified"], verify_rows),
                    "asked_per_round": _over(sums["num_draft_asks"], verify_rows),
                    "rows_per_step": _over(verify_rows, sums["num_steps"]),
                    "repeats": len(mine),
                }
            )
    return rows


def ratios_to(blocks: Sequence[Figure], ours: str, others: Sequence[str]) -> list[Figure]:
    """Paired ratios of total tokens/s, ``ours`` over each of the others, by number of users."""
    found = []
    for users in crowds(blocks):
        for other in others:
            pairs = _pairs(blocks, users, ours, other)
            if pairs:
                ratio = paired_ratio(*zip(*pairs, strict=True))
                found.append({"users": users, "to": other, **asdict(ratio)})
    return found


def best_of(blocks: Sequence[Figure], users: int, candidates: Sequence[str]) -> str:
    """The candidate with most tokens/s at so many users, in hindsight."""
    here = [block for block in blocks if block["users"] == users]

    def speed(name: str) -> float:
        return _mean([b for b in here if b["setting"] == name], "tokens_per_s_total") or 0.0

    return max(candidates, key=speed)


def crowds(blocks: Sequence[Figure]) -> list[int]:
    """Numbers of users that were measured, rising."""
    return sorted({block["users"] for block in blocks})


def names(blocks: Sequence[Figure]) -> list[str]:
    """Settings that were measured, by name."""
    return sorted({block["setting"] for block in blocks})


def draw_frontier(rows: Sequence[Figure], order: Sequence[str], title: str) -> bytes:
    """A PNG: total against per-user tokens/s, a line per setting, a point per number of users."""
    from matplotlib.figure import Figure as Canvas
    from matplotlib.ticker import ScalarFormatter

    canvas = Canvas(figsize=(7.5, 5.2), layout="constrained")
    axis = canvas.subplots()
    for index, setting in enumerate(order):
        mine = [row for row in rows if row["setting"] == setting]
        axis.plot(
            [row["tokens_per_s_user"] for row in mine],
            [row["tokens_per_s_total"] for row in mine],
            "o-",
            color=_COLOURS[index % len(_COLOURS)],
            linewidth=2.5 if setting == order[-1] else 1.5,
            label=setting,
        )
    for users in sorted({row["users"] for row in rows}):
        last = max(
            (row for row in rows if row["users"] == users),
            key=lambda row: row["tokens_per_s_total"],
        )
        axis.annotate(
            f"{users} user{'s' if users > 1 else ''}",
            (last["tokens_per_s_user"], last["tokens_per_s_total"]),
            xytext=(5, 5),
            textcoords="offset points",
            fontsize=9,
        )
    axis.set(xscale="log", yscale="log", xlabel="tokens/s per user", ylabel="tokens/s in all")
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_formatter(ScalarFormatter())
        side.set_minor_formatter(ScalarFormatter())
    axis.tick_params(which="minor", labelsize=7)
    axis.grid(which="both", alpha=0.25)
    axis.legend()
    axis.set_title(title, fontsize=10)
    data = BytesIO()
    canvas.savefig(data, dpi=_DPI)
    return data.getvalue()


def draw_ratios(found: Sequence[Figure], title: str) -> bytes:
    """A PNG: a bar per setting and number of users, the ratio with its lower bound as a whisker."""
    from matplotlib.figure import Figure as Canvas

    settings = list(dict.fromkeys(row["to"] for row in found))
    users = sorted({row["users"] for row in found})
    canvas = Canvas(figsize=(1.6 + 1.3 * len(settings), 4.2), layout="constrained")
    axis = canvas.subplots()
    width = 0.8 / len(users)
    for index, crowd in enumerate(users):
        rows = {row["to"]: row for row in found if row["users"] == crowd}
        at = [place + (index - (len(users) - 1) / 2) * width for place in range(len(settings))]
        values = [rows[name]["ratio"] if name in rows else np.nan for name in settings]
        lows = [(rows[name]["lower"] if name in rows else None) for name in settings]
        down = [v - (v if low is None else low) for v, low in zip(values, lows, strict=True)]
        axis.bar(
            at,
            values,
            width * 0.92,
            yerr=[down, [0.0] * len(down)],
            color=_COLOURS[index % len(_COLOURS)],
            error_kw={"elinewidth": 1, "capsize": 2},
            label=f"{crowd} users",
        )
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(range(len(settings)), settings, fontsize=8)
    axis.set_ylabel("tokens/s in all, ratio")
    axis.legend()
    axis.set_title(title, fontsize=10)
    data = BytesIO()
    canvas.savefig(data, dpi=_DPI)
    return data.getvalue()


def _pairs(
    blocks: Sequence[Figure], users: int, ours: str, other: str
) -> list[tuple[float, float]]:
    """Total tokens/s of both settings in each repeat that has both."""
    by: dict[str, dict[int, Any]] = {ours: {}, other: {}}
    for block in blocks:
        if block["users"] == users and block["setting"] in by:
            by[block["setting"]][block["repeat"]] = block["tokens_per_s_total"]
    return [(value, by[other][r]) for r, value in sorted(by[ours].items()) if r in by[other]]


def _mean(blocks: Sequence[Figure], name: str) -> float | None:
    values = [block[name] for block in blocks if block[name] is not None]
    return float(np.mean(values)) if values else None


def _over(count: float, whole: float) -> float | None:
    return count / whole if whole else None
