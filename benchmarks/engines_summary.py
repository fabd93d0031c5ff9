"""What blocks and probes of `engines.py` come to: medians, ratios, bounds, as text and picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import decode_bound
import numpy as np
from growing import Report

from dspark.bench.comparison import crowds, draw_frontier, names, ratios_to
from dspark.bench.figures import Figure

OURS, TORCH = "ours on vllm", "ours on torch"
ALONE = ("vllm", "vllm compiled", "vllm n-gram")
SERVED = "vllm served"
NAMES = (*ALONE, SERVED, TORCH, OURS)
REQUIRED = {("vllm", 1): 1.2, (SERVED, 1): 1.2}
"""What the lower bound of ours to it should reach."""
NOT_BELOW = {("vllm", 64): 1.0, (SERVED, 64): 1.0}
"""What the upper bound should reach: not below it beyond noise."""
BOUND_SHARE = 0.90


def summarise(report: Report) -> dict[str, Any]:
    """Medians with quartiles, ratios of ours to the rest with what they should reach, bounds."""
    blocks = report["blocks"]
    ratios = ratios_to(blocks, OURS, [name for name in NAMES if name != OURS])
    for ratio in ratios:
        place = (ratio["to"], ratio["users"])
        if ratio["lower"] is None:
            continue
        ratio["upper"] = ratio["ratio"] ** 2 / ratio["lower"]
        if place in REQUIRED:
            ratio |= {"required": REQUIRED[place], "holds": ratio["lower"] >= REQUIRED[place]}
        if place in NOT_BELOW:
            ratio |= {"not_below": NOT_BELOW[place], "holds": ratio["upper"] >= NOT_BELOW[place]}
    bounds = {}
    for name, probes in report.get("probes", {}).items():
        bounds[name] = decode_bound.bound_of(probes)
    if OURS in bounds:
        share = bounds[OURS]["share"]
        bounds[OURS] |= {"required": BOUND_SHARE, "holds": share >= BOUND_SHARE}
    return {"rates": rates(blocks), "ours_to": ratios, "decode_bound": bounds}


def rates(blocks: Sequence[Figure]) -> list[Figure]:
    """A row for each system and number of users: medians and quartiles over the repeats."""
    rows = []
    for users in crowds(blocks):
        for name in names(blocks):
            mine = [b for b in blocks if (b["users"], b["setting"]) == (users, name)]
            if mine:
                row: Figure = {"users": users, "setting": name, "repeats": len(mine)}
                for figure in ("tokens_per_s_total", "tokens_per_s_user", "accepted_length"):
                    values = [b[figure] for b in mine if b[figure] is not None]
                    low, median, high = np.percentile(values or [0.0], (25, 50, 75)).tolist()
                    row |= {figure: median, f"{figure}_quartiles": [low, high]}
                for figure in ("cpu", "others_cpu"):
                    row[figure] = float(np.median([b[figure] for b in mine]))
                rows.append(row)
    return rows


def lines(summary: dict[str, Any]) -> Iterator[str]:
    """The summary as text."""
    for row in summary["rates"]:
        low, high = row["tokens_per_s_user_quartiles"]
        yield (
            f"{row['users']:3d} users {row['setting']:<13s} {row['tokens_per_s_total']:7.1f} "
            f"tokens/s in all {row['tokens_per_s_user']:7.2f} ({low:.2f} to {high:.2f}) per user, "
            f"accepted {row['accepted_length']:.2f}, cores {row['cpu']:.2f}, "
            f"of others {row['others_cpu']:.3f}"
        )
    for ratio in summary["ours_to"]:
        lower = "" if ratio["lower"] is None else f", 90% bound {ratio['lower']:.3f}"
        verdict = "" if "holds" not in ratio else ("  ok" if ratio["holds"] else "  MISSED")
        yield (
            f"{ratio['users']:3d} users: {OURS} / {ratio['to']:<13s} = {ratio['ratio']:.3f}"
            f"{lower}, raw {ratio['raw_ratio']:.3f}{verdict}"
        )
    for name, bound in summary["decode_bound"].items():
        verdict = "" if "holds" not in bound else ("  ok" if bound["holds"] else "  MISSED")
        yield (
            f"{name}, one user: {bound['measured_tokens_per_s']:.1f} of "
            f"{bound['bound_tokens_per_s']:.1f} tokens/s ({bound['share']:.3f}): accepted "
            f"{bound['accepted_length']:.2f} / verify step {1e3 * bound['verify_step_s']:.1f} ms, "
            f"{1e3 * bound['between_s']:.1f} ms between steps{verdict}; "
            f"{1e3 * bound['draft_s']:.1f} of them draft: {bound['serial_share']:.3f} of "
            f"{bound['serial_bound_tokens_per_s']:.1f} tokens/s"
        )


def draw(report: Report) -> bytes:
    """Total against per-user rates, a line for each system; ours on vLLM is the thick one."""
    title = f"{report['machine']}, fp32, {report['plan']['threads']} threads, closed loop, by turns"
    return draw_frontier(report["summary"]["rates"], report["plan"]["systems"], title)
