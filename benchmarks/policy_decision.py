"""What a budget decision costs the router, on one core.

    python benchmarks/policy_decision.py --out results/policy_decision.json \\
        --picture results/policy_decision.png

Each policy decides for R requests with blocks of G drafts over a jagged step-time curve, again and
again over the same few random steps; ``lengths_us`` is one call of `BudgetPolicy.lengths`,
``step_us`` that and the call of `remember` that follows it in a lane. A repeat is the mean over
so many calls as take about a tenth of a second; the report has the median of the repeats, the
fastest and the slowest. ``choose_us`` is the whole of `DraftLengths.choose` under ``adaptive``:
blocks gathered, confidences recalibrated, weights, the curve, the decision. Targets of the project
are 200 us for 256 x 7 and 5000 us for 4096 x 16. ``load`` is the machine's load average before and
after, without which a figure from a shared machine says little: where others compete for the cores,
``--clock cpu`` counts processor time instead. Everything runs in one thread.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cluster.config import SchedulingConfig
from cluster.sampling import plain_sampling
from router.blocks import DraftBlock
from router.counters import LaneCounters
from router.draft_lengths import DraftLengths
from router.lane_request import LaneRequest
from router.policies import BudgetPolicy, PolicyInput, make_policy
from router.recalibration import Recalibrator
from router.step_load import StepLoad
from router.throughput import ThroughputProfile

SIZES = ((16, 7), (64, 7), (256, 7), (1024, 7), (4096, 16))
POLICIES = ("causal", "lagged", "retrospective", "adaptive", "threshold:0.6", "full")
TARGETS_US = {(256, 7): 200.0, (4096, 16): 5000.0}
NUM_STEPS = 8
REPEAT_S = 0.1
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def main() -> None:
    """Measure, write JSON, draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    args = parser.parse_args()
    before = os.getloadavg()[0]
    rows = list(measure(args.repeats, CLOCKS[args.clock]))
    report = {
        "numpy": np.__version__,
        "clock": args.clock,
        "repeats": args.repeats,
        "load": [before, os.getloadavg()[0]],
        "targets_us": {f"{r}x{g}": us for (r, g), us in TARGETS_US.items()},
        "decisions": rows,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\\n")
    if args.picture is not None:
        draw(rows, args.picture)


def measure(repeats: int, clock: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """One row per size and policy, and one per size for the whole choice."""
    for num_rows, gamma in SIZES:
        steps = [make_step(num_rows, gamma, seed) for seed in range(NUM_STEPS)]
        for name in POLICIES:
            policy = make_policy(name, min_gain=0.0)  # adaptive decides every time
            for step in steps:
                policy.remember(step)
            row = {"policy": name, "rows": num_rows, "gamma": gamma}
            row |= timed("lengths_us", deciding(policy, steps), repeats, clock)
            row |= timed("step_us", deciding_and_remembering(policy, steps), repeats, clock)
            print(json.dumps(row), flush=True)
            yield row
        row = {"policy": "DraftLengths.choose", "rows": num_rows, "gamma": gamma}
        row |= timed("choose_us", choosing(num_rows, gamma), repeats, clock)
        print(json.dumps(row), flush=True)
        yield row


def step_times(size: int) -> np.ndarray:
    """Seconds of 0..size tokens: a line with a stair every 64 tokens."""
    tokens = np.arange(size + 1)
    seconds: np.ndarray = 0.010 + 2e-5 * tokens + 5e-4 * (tokens // 64)
    return seconds


def make_step(num_rows: int, gamma: int, seed: int) -> PolicyInput:
    """Sampled drafts for the policies that take them, so ``adaptive`` is timed on its slower path;
    for ``retrospective`` the same values count as coupled ones."""
    rng = np.random.default_rng(seed)
    survival_RG = rng.beta(4, 1.2, (num_rows, gamma)).cumprod(axis=1)
    return PolicyInput(
        survival_RG=survival_RG,
        num_drafts_R=np.full(num_rows, gamma),
        deterministic_R=np.zeros(num_rows, np.bool_),
        weight_R=np.ones(num_rows),
        rids=np.arange(num_rows),
        step_s_B=step_times(num_rows * (gamma + 1)),
    )


def fresh(steps: list[PolicyInput], policy: BudgetPolicy) -> Iterator[PolicyInput]:
    """The steps over and over, each without what a policy has left computed on it."""
    certain = policy.name == "retrospective"
    parts = [
        {name: getattr(step, name) for name in PolicyInput.__dataclass_fields__} for step in steps
    ]
    for part in parts:
        if certain:
            part["deterministic_R"] = np.ones(len(part["rids"]), np.bool_)
    for part in itertools.cycle(parts):
        yield PolicyInput(**part)


def deciding(policy: BudgetPolicy, steps: list[PolicyInput]) -> Callable[[], object]:
    """One decision, the checks of its input included."""
    source = fresh(steps, policy)
    return lambda: policy.lengths(next(source))


def deciding_and_remembering(
    policy: BudgetPolicy, steps: list[PolicyInput]
) -> Callable[[], object]:
    """What a lane does with a policy in one step."""
    source = fresh(steps, policy)

    def call() -> None:
        step = next(source)
        policy.lengths(step)
        policy.remember(step)

    return call


def choosing(num_rows: int, gamma: int) -> Callable[[], object]:
    """One step's choice in a lane of coupled requests."""
    rng = np.random.default_rng(0)
    size = num_rows * (gamma + 1)
    tokens = np.unique(np.geomspace(1, size, 40).astype(np.int32))
    lengths = DraftLengths(
        recalibrator=Recalibrator(),
        profile=ThroughputProfile(tokens, step_times(size)[tokens].astype(np.float32)),
        counters=LaneCounters(),
        explore_fraction=1 / 64,
        scheduling=SchedulingConfig(min_gain=0.0),
    )
    rows = [make_row(rid, rng.beta(4, 1.2, gamma)) for rid in range(num_rows)]
    load = StepLoad(num_rows=num_rows, num_tokens=num_rows, sum_context=500 * num_rows)
    return lambda: lengths.choose(rows, load=load, room=size)


def make_row(rid: int, confidence: np.ndarray) -> LaneRequest:
    """A request with a block in hand."""
    row = LaneRequest(
        rid=rid,
        ids=[1, 2, 3],
        num_prompt=2,
        max_new_tokens=1000,
        stop_ids=(),
        sampling=plain_sampling(1.0, mode="coupled", seed=rid),
        draft=True,
    )
    row.block = DraftBlock(
        rid=rid,
        epoch=0,
        anchor=row.anchor,
        digest=0,
        ids=(5,) * len(confidence),
        confidence=confidence,
        q=None,
    )
    return row


def timed(
    name: str, call: Callable[[], object], repeats: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """Microseconds of a call: median, fastest and slowest of the repeats."""
    once = clock()
    for _ in range(3):
        call()
    num = max(int(REPEAT_S / max((clock() - once) / 3, 1e-7)), 3)
    each = []
    for _ in range(repeats):
        start = clock()
        for _ in range(num):
            call()
        each.append((clock() - start) / num * 1e6)
    spread = {"median": statistics.median(each), "best": min(each), "worst": max(each)}
    return {name: {key: round(value, 1) for key, value in spread.items()}}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Microseconds over the number of drafts, one line per policy."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    for name in dict.fromkeys(row["policy"] for row in rows):
        mine = [row for row in rows if row["policy"] == name]
        key = "choose_us" if "choose_us" in mine[0] else "lengths_us"
        sizes = [row["rows"] * row["gamma"] for row in mine]
        medians = [row[key]["median"] for row in mine]
        axes.plot(sizes, medians, marker="o", markersize=4, label=name)
        best, worst = ([row[key][end] for row in mine] for end in ("best", "worst"))
        axes.fill_between(sizes, best, worst, alpha=0.15)
    for n, ((num_rows, gamma), us) in enumerate(TARGETS_US.items()):
        label = "target" if n == 0 else None
        axes.plot(num_rows * gamma, us, marker="_", markersize=22, color="black", label=label)
    axes.set(xscale="log", yscale="log", xlabel="drafts in hand (requests x block)")
    axes.set(ylabel="microseconds a decision", title="Budget decision on one core")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
