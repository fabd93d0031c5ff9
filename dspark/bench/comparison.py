"""Blocks of settings summed up: rates per setting and users, paired ratios, a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from io import BytesIO
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dspark.bench.figures import Figure
from dspark.bench.ratios import paired_ratio

F64 = NDArray[np.float64]

_DPI: Final = 130
_LEAST_RATE: Final = 1e-9
"""Of a block without a token: its ratios are beyond belief, as they should be."""
_LEAST_REPEATS: Final = 8
"""That tell what a prompt token takes."""
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
    """Paired ratios of total tokens/s, ``ours`` over each of the others, by number of users.

    ``ratio`` and ``lower`` are of rates with prompts levelled (`levelled`), ``raw_ratio`` and
    ``raw_lower`` of those that were seen.
    """
    blocks = levelled(blocks)
    found = []
    for users in crowds(blocks):
        for other in others:
            pairs = _pairs(blocks, users, ours, other, "levelled_tokens_per_s")
            if pairs:
                ratio = paired_ratio(*zip(*pairs, strict=True))
                seen = _pairs(blocks, users, ours, other, "tokens_per_s_total")
                raw = paired_ratio(*zip(*seen, strict=True))
                found.append(
                    {
                        "users": users,
                        "to": other,
                        **asdict(ratio),
                        "raw_ratio": raw.ratio,
                        "raw_lower": raw.lower,
                        "lower_by_load": _lower_by_load(blocks, users, ours, other),
                    }
                )
    return found


def _lower_by_load(blocks: Sequence[Figure], users: int, ours: str, other: str) -> float | None:
    """The bound if all pairs of one load (``load`` of a block; by itself without) count as one:
    what users and state of a load have in common is no fluke of every pair."""
    here = [block for block in blocks if block["users"] == users]
    load_of: dict[int, int] = {
        block["repeat"]: block["load" if "load" in block else "repeat"] for block in here
    }
    loads = []
    for load in sorted(set(load_of.values())):
        mine = [block for block in here if load_of[block["repeat"]] == load]
        if pairs := _pairs(mine, users, ours, other, "levelled_tokens_per_s"):
            loads.append(paired_ratio(*zip(*pairs, strict=True)).ratio)
    return paired_ratio(loads, [1.0] * len(loads)).lower


def levelled(blocks: Sequence[Figure]) -> list[Figure]:
    """The blocks with ``levelled_tokens_per_s``: the rate if a block had met as many prompt tokens,
    for each token that it emitted, as all blocks of its number of users did together.

    In the long run every setting computes a prompt for each answer. In a few seconds it is chance
    how many prompts come, and a prompt token takes as long as a decoded one or longer: most of what
    blocks of one setting differ by, where many users ask. A control variate: what a prompt token
    takes is fitted to all settings at once (logarithms of rates, a level of its own for each
    setting and each repeat), and expected to be due as often in each of them.
    """
    return [
        block | {"levelled_tokens_per_s": rate}
        for users in crowds(blocks)
        for block, rate in _levelled([block for block in blocks if block["users"] == users])
    ]


def _levelled(here: Sequence[Figure]) -> Iterator[tuple[Figure, float]]:
    """Blocks of one number of users with their levelled rates."""
    seconds = np.array([block["measured_s"] for block in here])
    rates = np.array([block["tokens_per_s_total"] for block in here])
    prompts = np.array([block["counters"].get("num_prefill_tokens", 0.0) for block in here])
    per_token = prompts.sum() / max(float(rates @ seconds), _LEAST_RATE)
    due_per_s = rates * per_token - prompts / seconds
    factor = np.exp(-_prompt_s(here, rates, due_per_s) * due_per_s)
    yield from zip(here, (rates * factor).tolist(), strict=True)


def _prompt_s(here: Sequence[Figure], rates: F64, due_per_s: F64) -> float:
    """Seconds of a prompt token, by least squares; what is common to a setting or to a repeat is
    no evidence. 0 where there are too few repeats to tell."""
    seen = rates > 0
    repeats = np.array([block["repeat"] for block in here])
    if len(np.unique(repeats)) < _LEAST_REPEATS:
        return 0.0
    settings = np.array([block["setting"] for block in here])
    x, y = due_per_s[seen], np.log(rates[seen])
    for _ in range(2):  # once would do if every repeat had every setting
        for group in (settings[seen], repeats[seen]):
            for value in np.unique(group):
                x[group == value] -= x[group == value].mean()
                y[group == value] -= y[group == value].mean()
    spread = float(x @ x)
    return max(float(x @ y) / spread, 0.0) if spread else 0.0


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
    blocks: Sequence[Figure], users: int, ours: str, other: str, rate: str
) -> list[tuple[float, float]]:
    """Tokens/s of both settings in each repeat that has both."""
    by: dict[str, dict[int, Any]] = {ours: {}, other: {}}
    for block in blocks:
        if block["users"] == users and block["setting"] in by:
            by[block["setting"]][block["repeat"]] = block[rate]
    return [(value, by[other][r]) for r, value in sorted(by[ours].items()) if r in by[other]]


def _mean(blocks: Sequence[Figure], name: str) -> float | None:
    values = [block[name] for block in blocks if block[name] is not None]
    return float(np.mean(values)) if values else None


def _over(count: float, whole: float) -> float | None:
    return count / whole if whole else None
