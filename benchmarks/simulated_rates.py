"""The rate model against the event simulator: `simulated_rates.py [OUT_FOLDER]`.

Closed loops over step curves, numbers of users, draft times, policies and sizes of pools. Each
figure of the events is a mean over some seeds. The two agree in a cell if tokens per second differ
by at most 5%, or by no more than the 95% interval of the events' own mean where that is wider (a
lane with two regimes that are about as good stays in the one that it happens upon). Writes
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
from matplotlib.ticker import NullFormatter

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
NUM_SEEDS = 4
STUDENT = 3.182
"""Two-sided 95% quantile with as many seeds less one."""
WARMUP_S = 3


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
            f"{row['events']['tokens_per_s']:7.0f} (+- {row['spread']:.1%}) / "
            f"{row['rates']['tokens_per_s']:7.0f} tokens/s {row['ratio']['tokens_per_s'] - 1:+.1%} "
            f"{'' if row['agrees'] else 'DIFFERS '}"
            f"{row['events_s']:.1f} / {row['rates_s']:.2f} s",
            flush=True,
        )
    errors = [abs(row["ratio"]["tokens_per_s"] - 1) for row in rows]
    print(
        f"{len(rows)} cells: median error {statistics.median(errors):.1%}, largest "
        f"{max(errors):.1%}; {sum(row['agrees'] for row in rows)} agree within {BOUND:.0%} "
        f"({sum(row['spread'] > BOUND for row in rows)} of them are judged by the 95% interval of "
        f"the events' mean, which is wider)"
    )
    (folder / "simulated_rates.json").write_text(json.dumps(rows, indent=1) + "\n")
    draw(rows, folder / "simulated_rates.png")


def compared(curve: str, users: int, draft_s: float, policy: str, pool: tuple[int, int]) -> dict:
    """One cell."""
    verifiers, drafters = pool
    tree = {
        # Few users: their texts have to average out.
        "duration_s": WARMUP_S + 6 * max(32 / users, 1),
        "warmup_s": WARMUP_S,
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
    began = time.process_time()
    runs = [
        World(load_scenario(tree | {"seed": seed})).run().figures() for seed in range(NUM_SEEDS)
    ]
    events_s = time.process_time() - began
    began = time.process_time()
    lane = LaneRates(pair_of(load_scenario(tree)), num_lanes=verifiers, num_drafters=drafters)
    state = PoolRates(lane, num_lanes=verifiers, most=-(-users // verifiers)).closed(users)
    rates_s = time.process_time() - began
    events = {
        "tokens_per_s": statistics.mean(run["tokens_per_s"] for run in runs),
        "user_tokens_per_s": statistics.mean(run["user_tokens_per_s"]["p50"] for run in runs),
        "budget": statistics.mean(run["budget"] for run in runs),
        "accepted_length": statistics.mean(run["accepted_length"] for run in runs),
    }
    rates = {
        "tokens_per_s": state.tokens_per_s,
        "user_tokens_per_s": state.user_tokens_per_s[1],
        "budget": 1 + state.num_verified,
        "accepted_length": state.tau,
    }
    ratio = {key: rates[key] / events[key] for key in events}
    spread = spread_of([run["tokens_per_s"] for run in runs])
    return {
        "curve": curve,
        "users": users,
        "draft_s": draft_s,
        "policy": policy,
        "pool": pool,
        "seeds": NUM_SEEDS,
        "events": events,
        "spread": spread,
        "rates": rates,
        "ratio": ratio,
        "agrees": abs(ratio["tokens_per_s"] - 1) <= max(BOUND, spread),
        "events_s": events_s / NUM_SEEDS,
        "rates_s": rates_s,
    }


def spread_of(values: list[float]) -> float:
    """Half the 95% interval of their mean, as a share of it."""
    error = statistics.stdev(values) / len(values) ** 0.5
    return STUDENT * error / statistics.mean(values)


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
        axis.set(xlabel=f"{key}, events", ylim=(0.8, 1.2))
        if key.endswith(("per_s", "user")):
            axis.set_xscale("log")
            axis.xaxis.set_minor_formatter(NullFormatter())
    axes[0].set_ylabel("rate model over events")
    axes[0].legend(fontsize=7)
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results")
