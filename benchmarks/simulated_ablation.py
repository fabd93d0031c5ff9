"""What each part of the scheduling is worth, simulated: `simulated_ablation.py [OUT_FOLDER]`.

Every part is taken out of the whole by itself, in every scenario, with several seeds; the same
users send the same requests with it and without. A scenario is there because one part or another
should matter in it; that it does nothing, or harm, elsewhere is told as well. Writes
`simulated_ablation.json`, `.txt` and a picture: tokens/s with the part over tokens/s without it.

    python benchmarks/simulated_ablation.py                    # all, some ten minutes of one core
    python benchmarks/simulated_ablation.py OUT --scenarios "slows down" --seeds 0 1 2 3 4
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import yaml

matplotlib.use("Agg")
from matplotlib import pyplot

from cluster.errors import ConfigError
from deploy.simulation.scenario import Run, built_in, load_scenario
from deploy.simulation.sweep import simulate

SEEDS = (0, 1, 2)
SAME = 0.01
"""Ratios that are all within this of 1 say that a part does nothing."""
WHOLE = "whole"
KEPT = (
    "tokens_per_s",
    "ttft_s",
    "itl_s",
    "accepted_length",
    "budget",
    "rows_per_step",
    "step_s",
    "step_error",
)

Row = dict[str, Any]


class Part(NamedTuple):
    """One part, and how to do without it."""

    name: str
    without: tuple[str, ...]


PARTS = (
    Part("gather rule, against when_free", ("router.scheduling.gather=when_free",)),
    Part("gather rule, against wait_for_all", ("router.scheduling.gather=wait_for_all",)),
    Part("draft gating", ("router.scheduling.gate_drafts=false",)),
    Part("late dispatch", ("router.scheduling.late_dispatch=false",)),
    Part("live profile", ("router.scheduling.live_profile=false",)),
    Part("context term", ("router.scheduling.context_term=false",)),
    Part("recalibration", ("router.scheduling.recalibrate=false",)),
    Part("coupled mode, against rejection", ("acceptance.regime=rejection",)),
)


class Setup(NamedTuple):
    """A built-in scenario, changed."""

    why: str
    base: str
    settings: tuple[str, ...]


def setups(path: Path) -> dict[str, Setup]:
    """By name, from the file that lists them."""
    return {
        name: Setup(entry["why"], entry["base"], tuple(entry["set"]))
        for name, entry in yaml.safe_load(path.read_text()).items()
    }


SETUPS = setups(Path(__file__).parent / "scenarios" / "ablation.yaml")


def main(args: argparse.Namespace) -> None:
    """Run everything, print, write, draw; what is done is written as it comes."""
    names = args.scenarios or list(SETUPS)
    if unknown := [name for name in names if name not in SETUPS]:
        raise ConfigError(f"no scenario {unknown[0]!r}", hint=f"one of {', '.join(SETUPS)}")
    args.folder.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"seeds": args.seeds, "scenarios": {}, "rows": []}
    text = ""
    for name in names:
        found = ablated(name, args.seeds, num_processes=args.processes, seconds=args.seconds)
        report["scenarios"][name] = SETUPS[name]._asdict()
        report["rows"] += found
        lines = "\n".join(table(name, found)) + "\n"
        print(lines, end="", flush=True)
        text += lines
        (args.folder / "simulated_ablation.json").write_text(json.dumps(report, indent=1) + "\n")
        (args.folder / "simulated_ablation.txt").write_text(text)
    draw(report["rows"], names, args.folder / "simulated_ablation.png")


def ablated(
    name: str, seeds: Sequence[int], *, num_processes: int = 1, seconds: float | None = None
) -> list[Row]:
    """One row for each part: figures with it and without, by seed.

    Args:
        seconds: of simulated time in place of the scenario's; a quarter of them is warm-up.
    """
    runs = [
        Run(variant=variant, point=seed, scenario=load_scenario(*source(name, less, seed, seconds)))
        for variant, less in [(WHOLE, ()), *((part.name, part.without) for part in PARTS)]
        for seed in seeds
    ]
    played = {
        (run.variant, run.point): {key: tally.figures()[key] for key in KEPT}
        for run, tally in zip(runs, simulate(runs, num_processes=num_processes), strict=True)
    }
    rows = []
    for part in PARTS:
        whole = [played[WHOLE, seed] for seed in seeds]
        less = [played[part.name, seed] for seed in seeds]
        ratios = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(whole, less, strict=True)]
        rows.append(
            {
                "scenario": name,
                "part": part.name,
                "without": part.without,
                "ratios": ratios,
                "median": statistics.median(ratios),
                "says": verdict(ratios),
                "whole": whole,
                "less": less,
            }
        )
    return rows


def source(
    name: str, less: tuple[str, ...], seed: int, seconds: float | None
) -> tuple[Path, list[str]]:
    """The file and the settings of one run."""
    setup = SETUPS[name]
    settings = [*setup.settings, *less, f"seed={seed}", "points=[]", "variants=[{name: all}]"]
    if setup.base == "laptop" and "acceptance.regime=rejection" in less:
        settings.append("acceptance.domains=embedded_rejection")
    if seconds is not None:
        settings += [f"duration_s={seconds}", f"warmup_s={seconds / 4}"]
    return built_in(setup.base), settings


def verdict(ratios: Sequence[float]) -> str:
    """What the seeds say together."""
    if max(abs(ratio - 1) for ratio in ratios) <= SAME:
        return "nothing"
    if min(ratios) > 1:
        return "helps"
    return "harms" if max(ratios) < 1 else "unclear"


def table(name: str, rows: Sequence[Row]) -> Iterator[str]:
    """One scenario as text."""
    rate = middle(rows[0]["whole"], "tokens_per_s")
    yield f"{name}: {SETUPS[name].why} ({rate:.0f} tokens/s)"
    both = "with / without"
    yield f"  {'':34s}{'tokens/s with over without':32s}{both:>18s}{both:>18s}"
    yield f"  {'part':34s}{'median':>8s}{'range':>16s}{'step error %':>26s}{'TTFT p95 ms':>18s}"
    for row in rows:
        low, high = min(row["ratios"]), max(row["ratios"])
        error, ttft = (
            [factor * middle([f[key] for f in row[k]], q) for k in ("whole", "less")]
            for key, q, factor in (("step_error", "p50", 100), ("ttft_s", "p95", 1e3))
        )
        yield (
            f"  {row['part']:34s}{row['median']:8.3f}{f'{low:.3f} to {high:.3f}':>16s}"
            f"  {row['says']:8s}{f'{error[0]:.1f} / {error[1]:.1f}':>16s}"
            f"{f'{ttft[0]:.0f} / {ttft[1]:.0f}':>18s}"
        )


def middle(figures: Sequence[dict[str, Any]], key: str) -> float:
    """Median over the seeds."""
    return statistics.median(float(f[key]) for f in figures)


def draw(rows: Sequence[Row], names: Sequence[str], picture: Path) -> None:
    """Bars by part, one panel for each scenario; the seeds as dots."""
    parts = [part.name for part in PARTS][::-1]
    columns = min(len(names), 4)
    figure, grid = pyplot.subplots(
        -(-len(names) // columns),
        columns,
        figsize=(3.4 * columns + 2, 3.1 * -(-len(names) // columns)),
        layout="constrained",
        squeeze=False,
    )
    for axis in grid.flat[len(names) :]:
        axis.set_visible(False)
    for n, (axis, name) in enumerate(zip(grid.flat, names, strict=False)):
        for row in (row for row in rows if row["scenario"] == name):
            place, median = parts.index(row["part"]), row["median"]
            color = {"helps": "#009E73", "harms": "#D55E00"}.get(row["says"], "#999999")
            axis.barh(place, median - 1, left=1, color=color)
            axis.plot(row["ratios"], [place] * len(row["ratios"]), "k.", markersize=3)
            axis.annotate(
                f"{median:.2f}", (1.0, place), xytext=(-4, 0), textcoords="offset points",
                ha="right", va="center", fontsize=7,
            )  # fmt: skip
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_title(name, fontsize=9)
        axis.set_yticks(range(len(parts)), parts if n % columns == 0 else [], fontsize=7)
        axis.tick_params(axis="x", labelsize=7)
        axis.margins(x=0.2)
        axis.grid(axis="x", alpha=0.3, linewidth=0.5)
    figure.suptitle("Tokens/s with a part of the scheduling over tokens/s without it, simulated")
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description="What each part of the scheduling is worth.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent / "results")
    parser.add_argument("--scenarios", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--seconds", type=float, help="simulated, in place of the scenarios' own")
    parser.add_argument("--processes", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
