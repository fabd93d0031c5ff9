"""The gather rule against dispatch-when-free and wait-for-all: step curves, loads, draft times.

    python -m benchmarks.dispatch_grid --out dispatch.json --picture dispatch.png

Runs the real lane on a virtual clock (`tests.router.lane_world`): requests start staggered and are
replaced when they end, draft and step times jitter, frames take their time. ``simple`` is the
better of the two simple rules, each without late dispatch; ``late`` is dispatch-when-free with it.
A cell holds if the rule reaches 0.97 of ``simple``, and 1.3 times dispatch-when-free wherever the
model says that one group is worth 1.45 of two, ``2 T(R/2) / (T(R) + T_d + RTT)``. Deterministic by
seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.config import SchedulingConfig
from tests.router.lane_world import Setting, throughput

CURVES: dict[str, Callable[[int], float]] = {
    "memory-bound, 20 + 0.01 B ms": lambda n: (20 + 0.01 * n) / 1000,
    "mixed, 10 + 0.1 B ms": lambda n: (10 + 0.1 * n) / 1000,
    "compute-bound, 1 + 0.2 B ms": lambda n: (1 + 0.2 * n) / 1000,
}
NUM_REQUESTS = (1, 4, 32, 128)
DRAFT_MS = (2, 6, 15)
ROUND_TRIPS_MS = (0.5, 1.0)
ACCEPTANCE = {"tau 4.5 of 8": (7, 0.84), "tau 1.8 of 6": (5, 0.45)}
RULES = {
    "when_free": ("when_free", False),
    "wait_for_all": ("wait_for_all", False),
    "late": ("when_free", True),
    "rule": ("steady", True),
}
LEAST_OF_SIMPLE = 0.97
LEAST_GAIN = 1.3
WORTH_WHILE = 1.45


def main() -> None:
    """Play the grid, write JSON, draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--policy", default="full", help="draft lengths, see router.policies")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cycles", type=float, default=60, help="length of a run, in full rounds")
    args = parser.parse_args()
    cells = []
    grid = itertools.product(CURVES, NUM_REQUESTS, DRAFT_MS, ROUND_TRIPS_MS, ACCEPTANCE)
    for curve, num_requests, draft_ms, round_trip_ms, acceptance in grid:
        cell = play(
            curve,
            num_requests,
            draft_ms,
            round_trip_ms,
            acceptance,
            args.policy,
            args.seeds,
            args.cycles,
        )
        cells.append(cell)
        print(
            f"{curve:30} R {num_requests:4} T_d {draft_ms:3} RTT {round_trip_ms:3} {acceptance:13}"
            f" | {cell['of_simple']:.3f} of simple, {cell['of_late']:.3f} of late,"
            f" {cell['gain']:.2f} x when-free, model {cell['model']:.2f}"
            f"{'' if cell['holds'] else '  <-- does not hold'}",
            flush=True,
        )
    report = {
        "policy": args.policy,
        "seeds": args.seeds,
        "worst_of_simple": min(cell["of_simple"] for cell in cells),
        "worst_of_late": min(cell["of_late"] for cell in cells),
        "all_hold": all(cell["holds"] for cell in cells),
        "cells": cells,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.picture:
        draw(cells, args.picture)


def play(
    curve: str,
    num_requests: int,
    draft_ms: float,
    round_trip_ms: float,
    acceptance: str,
    policy: str,
    num_seeds: int,
    num_cycles: float,
) -> dict[str, Any]:
    """One cell: tokens per second of each rule, median over seeds, and what follows from them."""
    gamma, survival = ACCEPTANCE[acceptance]
    rates: dict[str, float] = {}
    for name, (gather, late) in RULES.items():
        scheduling = SchedulingConfig(
            policy=policy, gather=gather, late_dispatch=late, gate_drafts=False
        )
        runs = []
        for seed in range(num_seeds):
            setting = Setting(
                step_s=CURVES[curve],
                num_requests=num_requests,
                draft_s=draft_ms / 1000,
                hop_s=round_trip_ms / 3000,
                gamma=gamma,
                survival=survival,
                seed=seed,
            )
            runs.append(throughput(setting, scheduling, num_cycles=num_cycles))
        rates[name] = statistics.median(runs)
    step_ms = [
        1000 * CURVES[curve](round(n * (1 + gamma))) for n in (num_requests, num_requests / 2)
    ]
    model = 2 * step_ms[1] / (step_ms[0] + draft_ms + round_trip_ms) if num_requests > 1 else 1.0
    of_simple = rates["rule"] / max(rates["when_free"], rates["wait_for_all"])
    gain = rates["rule"] / rates["when_free"]
    return {
        "curve": curve,
        "num_requests": num_requests,
        "draft_ms": draft_ms,
        "round_trip_ms": round_trip_ms,
        "acceptance": acceptance,
        "tokens_per_s": {name: round(rate, 1) for name, rate in rates.items()},
        "of_simple": round(of_simple, 4),
        "of_late": round(rates["rule"] / rates["late"], 4),
        "gain": round(gain, 3),
        "model": round(model, 3),
        "holds": of_simple >= LEAST_OF_SIMPLE and (model < WORTH_WHILE or gain >= LEAST_GAIN),
    }


def draw(cells: list[dict[str, Any]], path: Path) -> None:
    """Gain over dispatch-when-free, of the rule and of wait-for-all, by curve and load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(CURVES), figsize=(13, 4), sharey=True)
    colours = dict(zip(DRAFT_MS, ("tab:blue", "tab:orange", "tab:green"), strict=True))
    for axis, curve in zip(axes, CURVES, strict=True):
        for draft_ms, colour in colours.items():
            mine = [
                cell
                for cell in cells
                if (cell["curve"], cell["draft_ms"]) == (curve, draft_ms)
                and (cell["round_trip_ms"], cell["acceptance"]) == (1.0, next(iter(ACCEPTANCE)))
            ]
            loads = [cell["num_requests"] for cell in mine]
            rates = [cell["tokens_per_s"] for cell in mine]
            rule = [rate["rule"] / rate["when_free"] for rate in rates]
            wait = [rate["wait_for_all"] / rate["when_free"] for rate in rates]
            axis.plot(loads, rule, "o-", color=colour, label=f"rule, drafts take {draft_ms} ms")
            axis.plot(loads, wait, "x:", color=colour, label="wait for all")
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set(xscale="log", title=curve, xlabel="requests", xticks=NUM_REQUESTS)
        axis.set_xticklabels([str(n) for n in NUM_REQUESTS])
        axis.minorticks_off()
    axes[0].set_ylabel("tokens/s over dispatch-when-free")
    axes[-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
