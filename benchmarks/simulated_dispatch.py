"""The gather rule over a grid, with the whole simulator: `simulated_dispatch.py [OUT_FOLDER]`.

Step curves (memory-bound, mixed, compute-bound) x requests at a time x draft times, as the design's
sketch has them: staggered requests that are replaced when they end, jitter on steps, drafts and
links, whole blocks verified. The rule against both simple ones. It holds in a cell if it yields
0.97 of the better one, and 1.3 of `when_free` wherever one group should be worth 1.45 of two,
``2 T_v(R/2) / (T_v(R) + T_d + RTT)``. Writes `simulated_dispatch.json` and a picture; prints what
does not hold.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from deploy.simulation.presets import CURVES
from deploy.simulation.scenario import load_scenario
from deploy.simulation.world import World
from router.step_load import StepLoad

SHAPES = ("memory_bound", "mixed", "compute_bound")
USERS = (1, 4, 32, 128)
DRAFT_S = (0.002, 0.006, 0.015)
RULES = ("when_free", "wait_for_all", "steady")
SEEDS = (0, 1)
ACCEPTANCE = [0.8] * 5
HOP_S = 0.0004
NEARLY, CLEARLY, WORTH = 0.97, 1.3, 1.45


def main(folder: Path) -> None:
    """Run, judge, write, draw."""
    rows = []
    for shape, users, draft_s in itertools.product(SHAPES, USERS, DRAFT_S):
        rates = {rule: rate(shape, users, draft_s, rule) for rule in RULES}
        row = judged(shape, users, draft_s, rates)
        rows.append(row)
        print(
            f"{shape:14s} {users:4d} requests, {draft_s * 1e3:3.0f} ms: "
            + " ".join(f"{rule} {rates[rule]:.0f}" for rule in RULES)
            + f"  of the better {row['of_better']:.3f}, of when_free {row['of_when_free']:.2f}"
            + ("" if row["holds"] else "  DOES NOT HOLD"),
            flush=True,
        )
    print(f"holds in {sum(row['holds'] for row in rows)} of {len(rows)} cells")
    (folder / "simulated_dispatch.json").write_text(json.dumps(rows, indent=1) + "\n")
    draw(rows, folder / "simulated_dispatch.png")


def rate(shape: str, users: int, draft_s: float, rule: str) -> float:
    """Tokens per second, the median over the seeds."""
    round_s = CURVES[shape].step_s(full_step(users)) + draft_s + 3 * HOP_S
    seconds = max(120 * round_s, 2.0)
    tree = {
        "duration_s": 1.4 * seconds,
        "warmup_s": 0.4 * seconds,
        "router": {
            "scheduling": {"policy": "full", "gather": rule, "gate_drafts": False},
            "prefill_budget": 64,
        },
        "verifier": {"curve": shape, "max_requests": 128, "jitter": 0.05},
        "drafter": {"curve": {"fixed_s": draft_s}, "jitter": 0.05},
        "links": {"latency_s": 0.0003, "jitter_s": 0.0001},
        "acceptance": {"domains": [{"name": "all", "acceptance": ACCEPTANCE}]},
        "trace": {
            "kind": "staggered",
            "stagger_s": 0.2 * seconds,
            "users": users,
            "prompt": {"kind": "fixed", "mean": 8},
            "output": {"mean": 160},
        },
    }
    return statistics.median(
        World(load_scenario(tree, [f"seed={seed}"])).run().figures()["tokens_per_s"]
        for seed in SEEDS
    )


def full_step(users: int) -> StepLoad:
    """All rows with whole blocks."""
    return StepLoad(num_rows=users, num_tokens=users * (1 + len(ACCEPTANCE)))


def judged(shape: str, users: int, draft_s: float, rates: dict[str, float]) -> dict:
    """What is asked of a cell."""
    step_s, half_s = (CURVES[shape].step_s(full_step(n)) for n in (users, -(-users // 2)))
    of_better = rates["steady"] / max(rates["when_free"], rates["wait_for_all"])
    of_when_free = rates["steady"] / rates["when_free"]
    # One request alone has no other to be overlapped with: there is nothing to gather.
    worth = 2 * half_s / (step_s + draft_s + 3 * HOP_S) if users > 1 else 1.0
    return {
        "shape": shape,
        "users": users,
        "draft_s": draft_s,
        "tokens_per_s": rates,
        "of_better": of_better,
        "of_when_free": of_when_free,
        "worth": worth,
        "holds": of_better >= NEARLY and (worth < WORTH or of_when_free >= CLEARLY),
    }


def draw(rows: list[dict], picture: Path) -> None:
    """A panel for each curve: tokens/s of the rules over those of the better simple one."""
    figure, axes = pyplot.subplots(1, len(SHAPES), figsize=(13, 3.8), layout="constrained")
    for axis, shape in zip(axes, SHAPES, strict=True):
        mine = [row for row in rows if row["shape"] == shape]
        better = [max(r["tokens_per_s"][rule] for rule in RULES[:2]) for r in mine]
        for rule, marker in zip(RULES, ("v", "s", "o"), strict=True):
            ratio = [r["tokens_per_s"][rule] / b for r, b in zip(mine, better, strict=True)]
            axis.plot(ratio, marker, label=rule, markersize=6 if rule == "steady" else 4)
        axis.axhline(NEARLY, color="black", linewidth=0.8, linestyle=":")
        axis.set_xticks(
            range(len(mine)),
            [f"{r['users']}\n{r['draft_s'] * 1e3:.0f}" for r in mine],
            fontsize=7,
        )
        axis.set(title=shape, xlabel="requests, ms of drafting", ylim=(0.4, None))
        axis.grid(axis="y", alpha=0.3, linewidth=0.5)
    axes[0].set_ylabel("tokens/s over the better simple rule")
    axes[0].legend(fontsize=8)
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results")
