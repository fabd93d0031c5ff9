"""Draw the ratios of repeated `dspark demo --json` runs: `plot_demo.py RESULTS.json PICTURE.png`.

RESULTS.json holds ``{"machine": str, "runs": [{"concurrency": int, **figures}, ...]}``, where the
figures are what the demo writes. Each run is a dot, the bar their median.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

FIGURES = {
    "tokens_per_s_user": "tokens/s per user",
    "tokens_per_s_total": "tokens/s in all",
    "accepted_length": "accepted length",
}


def ratios(runs: list[dict], concurrency: int, figure: str) -> list[float]:
    """Drafted over plain, run by run."""
    return [
        run["drafted"][figure] / run["plain"][figure]
        for run in runs
        if run["concurrency"] == concurrency
    ]


def main(results: Path, picture: Path) -> None:
    """Read, draw, save."""
    data = json.loads(results.read_text())
    runs = data["runs"]
    levels = sorted({run["concurrency"] for run in runs})
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    width = 0.8 / len(levels)
    for n, level in enumerate(levels):
        label = f"{level} at once"
        for place, name in enumerate(FIGURES):
            values = ratios(runs, level, name)
            x = place + (n - (len(levels) - 1) / 2) * width
            median = statistics.median(values)
            axes.bar(x, median, width * 0.9, color=f"C{n}", label=label if place == 0 else None)
            axes.plot([x] * len(values), values, "k.", markersize=5)
            axes.annotate(f"{median:.2f}x", (x, max(values)), ha="center", va="bottom")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(FIGURES)), FIGURES.values())
    axes.set_ylabel("with drafts / without")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.2)
    axes.set_title(f"dspark demo, {data['machine']}", fontsize=9)
    axes.legend(loc="upper right", ncols=len(levels))
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
