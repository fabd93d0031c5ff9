"""The rate model against the event simulator: `simulated_rates.py [OUT_FOLDER]`.

Closed loops over step curves, numbers of users, draft times, policies and sizes of pools. Writes
`simulated_rates.json` and a picture of each figure of the one over that of the other. Nothing is
gated: a gate first has to learn, which a steady state does not show.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from deploy.simulation.rates import LaneRates
from deploy.simulation.rates_pair import pair_of
from deploy.simulation.rates_pool import PoolRates
from deploy.simulation.scenario import load_scenario
from deploy.simulation.world import World

CURVES = ("memory_bound", "mixed", "compute_bound", "large")
USERS = (4, 16, 64, 128)
DRAFT_S = (0.002, 0.015)
POLICIES = ("adaptive", "lagged", "fixed:2", "full")
POOLS = ((1, 1), (4, 1), (4, 2))
BOUND = 0.05


def grid() -> list[tuple[str, int, float, str, tuple[int, int]]]:
    """Every curve, load and draft time on one pair, then policies and pools by themselves."""
    cells = [(*c, "adaptive", (1, 1)) for c in itertools.product(CURVES, USERS, DRAFT_S)]
    cells += [(c, 32, 0.006, p, (1, 1)) for c in CURVES for p in POLICIES[1:]]
    cells += [(c, 64, 0.006, "adaptive", pool) for c in CURVES for pool in POOLS[1:]]
    return cells


def main(folder: Path) -> None:
    """Run both, compare, write, draw."""
    rows = []
    for curve, users, draft_s, policy, pool in grid():
        row = compared(curve, users, draft_s, policy, pool)
        rows.append(row)
        print(
            f"{curve:14s} {users:4d} users {draft_s * 1e3:4.0f} ms {policy:9s} {pool}: "
            f"{row['events']['tokens_per_s']:7.0f} / {row['rates']['tokens_per_s']:7.0f} tokens/s "
            f"{row['ratio']['tokens_per_s'] - 1:+.3f}, "
            f"{row['events_s']:.1f} / {row['rates_s']:.2f} s",
            flush=True,
        )
    errors = [abs(row["ratio"]["tokens_per_s"] - 1) for row in rows]
    print(
        f"{len(rows)} cells: median error {statistics.median(errors):.3f}, "
        f"largest {max(errors):.3f}, {sum(e > BOUND for e in errors)} over {BOUND}"
    )
    (folder / "simulated_rates.json").write_text(json.dumps(rows, indent=1) + "\n")
    draw(rows, folder / "simulated_rates.png")


def compared(curve: str, users: int, draft_s: float, policy: str, pool: tuple[int, int]) -> dict:
    """One cell."""
    verifiers, drafters = pool
    scenario = load_scenario(
        {
            "duration_s": 5 + 15 * max(32 / users, 1),  # few users: their texts have to average out
            "warmup_s": 5,
            "router": {"scheduling": {"policy": policy, "gate_drafts": False}},
            "verifier": {"curve": curve, "num_replicas": verifiers, "max_requests": 256},
            "drafter": {
                "num_replicas": drafters,
                "curve": {"fixed_s": draft_s, "per_block_s": 0.00005},
            },
            "trace": {
                "kind": "staggered",
                "users": users,
                "prompt": {"mean": 64},
                "output": {"mean": 200},
            },
        }
    )
    began = time.process_time()
    figures = World(scenario).run().figures()
    events_s = time.process_time() - began
    began = time.process_time()
    lane = LaneRates(pair_of(scenario), num_lanes=verifiers, num_drafters=drafters)
    state = PoolRates(lane, num_lanes=verifiers, most=-(-users // verifiers)).closed(users)
    rates_s = time.process_time() - began
    events = {
        "tokens_per_s": figures["tokens_per_s"],
        "user_tokens_per_s": figures["user_tokens_per_s"]["p50"],
        "budget": figures["budget"],
        "accepted_length": figures["accepted_length"],
    }
    rates = {
        "tokens_per_s": state.tokens_per_s,
        "user_tokens_per_s": state.user_tokens_per_s[1],
        "budget": 1 + state.num_verified,
        "accepted_length": state.tau,
    }
    return {
        "curve": curve,
        "users": users,
        "draft_s": draft_s,
        "policy": policy,
        "pool": pool,
        "events": events,
        "rates": rates,
        "ratio": {key: rates[key] / events[key] for key in events},
        "events_s": events_s,
        "rates_s": rates_s,
    }


def draw(rows: list[dict], picture: Path) -> None:
    """A panel for each figure, a dot for each cell."""
    keys = list(rows[0]["ratio"])
    figure, axes = pyplot.subplots(1, len(keys), figsize=(13, 3.4), layout="constrained")
    for axis, key in zip(axes, keys, strict=True):
        for n, curve in enumerate(CURVES):
            mine = [row for row in rows if row["curve"] == curve]
            axis.plot(
                [row["events"][key] for row in mine],
                [row["ratio"][key] for row in mine],
                "o",
                color=f"C{n}",
                markersize=4,
                alpha=0.8,
                label=curve,
            )
        axis.axhspan(1 - BOUND, 1 + BOUND, color="#dddddd", zorder=0)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(xlabel=f"{key}, events", ylim=(0.7, 1.35))
        if key.endswith(("per_s", "user")):
            axis.set_xscale("log")
    axes[0].set_ylabel("rate model over events")
    axes[0].legend(fontsize=7)
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results")
