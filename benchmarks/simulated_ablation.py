"""What each part of the scheduling is worth, simulated: `simulated_ablation.py [OUT_FOLDER]`.

Every part is taken out of the whole by itself, on four scenarios, under the condition in which it
matters (stated below, and the same for both runs of a pair). Closed loops: the same users send the
same requests. Writes `simulated_ablation.json` and a picture, and prints the table: tokens/s with
the part over tokens/s without it, the median over the seeds and their range.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from deploy.simulation.presets import CURVES
from deploy.simulation.scenario import load_scenario
from deploy.simulation.world import World

SEEDS = (0, 1, 2)


def curve(name: str) -> dict:
    """A curve by name, as a section whose values can be changed."""
    return {key: value for key, value in asdict(CURVES[name]).items() if value != ()}


TWO_POOLS = {
    "duration_s": 40,
    "warmup_s": 10,
    "verifier": {"num_replicas": 4, "curve": curve("large"), "max_requests": 64},
    "drafter": {"num_replicas": 2, "curve": {"fixed_s": 0.005, "per_block_s": 0.0001}},
    "acceptance": {"domains": "paper_dspark_5"},
    "trace": {"kind": "staggered", "users": 128, "prompt": {"mean": 256}, "output": {"mean": 256}},
}
ONE_LANE = {
    "duration_s": 40,
    "warmup_s": 10,
    "verifier": {"max_requests": 128},
    "acceptance": {"domains": "paper_dspark_5"},
    "trace": {"kind": "staggered", "users": 32, "prompt": {"mean": 64}, "output": {"mean": 256}},
}
SCENARIOS: dict[str, dict] = {
    "laptop": {
        "duration_s": 150,
        "warmup_s": 30,
        "verifier": {"curve": "laptop", "max_step_tokens": 512, "kv_tokens": 65536, "jitter": 0.05},
        "drafter": {
            "shares_verifier": True,
            "curve": {"fixed_s": 0.012, "per_block_s": 0.0035, "per_row_s": 0.0004},
        },
        "links": {"latency_s": 0.0004, "jitter_s": 0.0002},
        "acceptance": {"regime": "coupled", "domains": "embedded_coupled"},
        "trace": {
            "kind": "staggered",
            "users": 8,
            "prompt": {"mean": 80, "spread": 0.5},
            "output": {"mean": 96, "spread": 0.5},
        },
    },
    "two pools": TWO_POOLS,
    "compute-bound": ONE_LANE
    | {
        "verifier": {"curve": curve("compute_bound"), "max_requests": 128},
        "drafter": {"curve": {"fixed_s": 0.006, "per_block_s": 0.00005}},
    },
    "memory-bound": ONE_LANE
    | {
        "verifier": {"curve": curve("memory_bound"), "max_requests": 128},
        "drafter": {"curve": {"fixed_s": 0.015, "per_block_s": 0.00005}},
    },
}


class Part(NamedTuple):
    """One part, and how to do without it."""

    name: str
    without: tuple[str, ...]
    condition: tuple[str, ...] = ()
    note: str = ""


def parts(scenario: str) -> list[Part]:
    """What is taken out of a scenario."""
    first = 30 if scenario == "laptop" else 10
    slow = f"faults=[{{kind: slow_verifier, at_s: {first}, for_s: {2 * first}, factor: 3.0}}]"
    rejection = ("acceptance.regime=rejection",)
    if scenario == "laptop":
        rejection += ("acceptance.domains=embedded_rejection",)
    return [
        Part("gather rule (against when_free)", ("router.scheduling.gather=when_free",)),
        Part("gather rule (against wait_for_all)", ("router.scheduling.gather=wait_for_all",)),
        Part("draft gating", ("router.scheduling.gate_drafts=false",)),
        Part("late dispatch", ("router.scheduling.late_dispatch=false",)),
        Part(
            "live profile",
            ("router.scheduling.live_profile=false",),
            (slow,),
            "the verifier slows down threefold for a part of the run",
        ),
        Part(
            "context term",
            ("router.scheduling.context_term=false",),
            ("trace.prompt.mean=4000", "verifier.curve.per_context_s=0.0000003"),
            "prompts of 4000 tokens, 0.3 us a position",
        ),
        Part(
            "recalibration",
            ("router.scheduling.recalibrate=false",),
            ("acceptance.confidence_slope=2.0", "acceptance.confidence_offset=1.5"),
            "confidence with twice the slope in logits and 1.5 too high",
        ),
        Part(
            "coupled drafts (against rejection mode)",
            rejection,
            note="laptop: acceptance as measured in each mode; elsewhere the same acceptance, "
            "so what is left is the price of not looking ahead",
        ),
    ]


def main(folder: Path) -> None:
    """Run everything, write, draw, print."""
    rows = []
    for name, base in SCENARIOS.items():
        known: dict[tuple[tuple[str, ...], int], float] = {}
        for part in parts(name):
            if part.name == "context term" and name == "laptop":
                part = part._replace(condition=("trace.prompt.mean=1000",), note="1000 tokens")
            ratios, rates = [], []
            for seed in SEEDS:
                whole = known.setdefault(
                    (part.condition, seed), tokens_per_s(base, part.condition, seed)
                )
                less = tokens_per_s(base, (*part.condition, *part.without), seed)
                ratios.append(whole / less)
                rates.append((whole, less))
            row = {"scenario": name, "part": part.name, "ratios": ratios, "tokens_per_s": rates}
            rows.append(row | {"condition": list(part.condition), "note": part.note})
            print(
                f"{name:14s} {part.name:42s} {statistics.median(ratios):6.3f} "
                f"[{min(ratios):.3f}, {max(ratios):.3f}]  {rates[0][0]:.0f} / {rates[0][1]:.0f}",
                flush=True,
            )
    report = {"seeds": SEEDS, "scenarios": SCENARIOS, "rows": rows}
    (folder / "simulated_ablation.json").write_text(json.dumps(report, indent=1) + "\n")
    draw(rows, folder / "simulated_ablation.png")


def tokens_per_s(base: dict, settings: tuple[str, ...], seed: int) -> float:
    """Of one run."""
    tally = World(load_scenario(base, [*settings, f"seed={seed}"])).run()
    rate: float = tally.figures()["tokens_per_s"]
    return rate


def draw(rows: list[dict], picture: Path) -> None:
    """Bars by part, one panel for each scenario; the seeds as dots."""
    names = list(dict.fromkeys(row["part"] for row in rows))
    figure, axes = pyplot.subplots(1, len(SCENARIOS), figsize=(13, 4), layout="constrained")
    for axis, scenario in zip(axes, SCENARIOS, strict=True):
        for place, name in enumerate(reversed(names)):
            (row,) = (r for r in rows if (r["scenario"], r["part"]) == (scenario, name))
            middle = statistics.median(row["ratios"])
            axis.barh(place, middle - 1, left=1, color="#009E73" if middle >= 1 else "#D55E00")
            axis.plot(row["ratios"], [place] * len(row["ratios"]), "k.", markersize=4)
            axis.annotate(
                f"{middle:.2f}", (1.0, place), xytext=(-4, 0), textcoords="offset points",
                ha="right", va="center", fontsize=7,
            )  # fmt: skip
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_title(scenario, fontsize=9)
        axis.set_yticks(range(len(names)), reversed(names) if axis is axes[0] else [])
        axis.set_xlabel("tokens/s with over without", fontsize=8)
        axis.margins(x=0.15)
        axis.grid(axis="x", alpha=0.3, linewidth=0.5)
    figure.suptitle("What each part of the scheduling is worth, simulated")
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results")
