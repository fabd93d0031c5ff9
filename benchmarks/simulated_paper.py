"""The paper's Figures 7 and 8 in the simulator: `simulated_paper.py [OUT_FOLDER]`.

DSpark-5 against MTP-1 over concurrency, on a large and on a fast target. The lanes run the real
scheduler; engines, links and texts are simulated, with parameters fixed beforehand in
`scenarios/paper_*.yaml`. Writes `simulated_paper.json` and a picture, and prints what is compared
with the paper: each user's speed at matched total throughput, and the budget over concurrency.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot

from deploy.simulation.scenario import runs_of
from deploy.simulation.sweep import report_of, simulate

SCENARIOS = ("paper_flash", "paper_pro")
OURS, THEIRS = "DSpark-5", "MTP-1"
KEPT = ("tokens_per_s", "user_tokens_per_s", "budget", "accepted_length", "step_s", "rows_per_step")


def main(folder: Path) -> None:
    """Run, compare, write, draw."""
    found = {name: played(name) for name in SCENARIOS}
    for name, scenario in found.items():
        show(name, scenario)
    (folder / "simulated_paper.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, folder / "simulated_paper.png")


def played(name: str) -> dict:
    """Rows of a scenario, and the comparison."""
    runs = runs_of(Path(__file__).parent / "scenarios" / f"{name}.yaml")
    report = report_of(runs, simulate(runs))
    rows = [
        {"variant": row["variant"], "users": row["point"]}
        | {key: row["figures"][key] for key in KEPT}
        for row in report["rows"]
    ]
    return {"title": report["title"], "rows": rows, "compared": compared(rows)}


def compared(rows: list[dict]) -> dict:
    """Speed of a user at matched total, total at matched speed, and how the budget falls."""
    speed, total = line(rows, OURS)
    their_speed, their_total = line(rows, THEIRS)
    inside = (their_total >= total.min()) & (their_total <= total.max())
    at_total = np.interp(their_total[inside], total, speed) / their_speed[inside]
    rising = np.argsort(speed)
    reached = (their_speed >= speed.min()) & (their_speed <= speed.max())
    at_speed = np.interp(their_speed[reached], speed[rising], total[rising]) / their_total[reached]
    budget = [row["budget"] for row in rows if row["variant"] == OURS]
    return {
        "speed_at_matched_total": dict(
            zip(their_total[inside].round().tolist(), at_total.round(3).tolist(), strict=True)
        ),
        "total_at_matched_speed": dict(
            zip(their_speed[reached].round(1).tolist(), at_speed.round(3).tolist(), strict=True)
        ),
        "least_speed_ratio": float(at_total.min()),
        "largest_rise_of_budget": float(np.diff(budget).max()),
        "largest_fall_of_budget": float(-np.diff(budget).min()),
    }


def line(rows: list[dict], variant: str) -> tuple[np.ndarray, np.ndarray]:
    """Speed of a user and total, by rising total; loads past the highest total are left out."""
    mine = [row for row in rows if row["variant"] == variant]
    speed = np.array([row["user_tokens_per_s"]["mean"] for row in mine])
    total = np.array([row["tokens_per_s"] for row in mine])
    last = int(total.argmax()) + 1
    return speed[:last], np.maximum.accumulate(total[:last])


def show(name: str, scenario: dict) -> None:
    """The figures as text."""
    print(f"\n{scenario['title']}")
    for row in scenario["rows"]:
        print(
            f"  {row['variant']:9s} {row['users']:4.0f} users: {row['tokens_per_s']:7.0f} tok/s, "
            f"{row['user_tokens_per_s']['mean']:6.1f} a user, budget {row['budget']:.2f}, "
            f"accepted length {row['accepted_length']:.2f}"
        )
    for key, value in scenario["compared"].items():
        print(f"  {name} {key}: {value}")


def draw(found: dict, picture: Path) -> None:
    """Throughput against speed, and budget against concurrency."""
    figure, axes = pyplot.subplots(2, len(found), figsize=(10, 7), layout="constrained")
    for column, scenario in zip(axes.T, found.values(), strict=True):
        for variant, colour in ((OURS, "#0072B2"), (THEIRS, "#E69F00")):
            rows = [row for row in scenario["rows"] if row["variant"] == variant]
            users = [row["users"] for row in rows]
            speed = [row["user_tokens_per_s"]["mean"] for row in rows]
            total = [row["tokens_per_s"] for row in rows]
            column[0].plot(speed, total, "o-", color=colour, markersize=4, label=variant)
            for x, y, number in zip(speed, total, users, strict=True):
                place = {"textcoords": "offset points", "xytext": (4, 4), "fontsize": 6}
                column[0].annotate(f"{number:.0f}", (x, y), color=colour, **place)
            budget = [row["budget"] for row in rows]
            column[1].plot(users, budget, "o-", color=colour, markersize=4, label=variant)
        column[0].set(xlabel="tokens/s of a user", ylabel="tokens/s in all", ylim=(0, None))
        column[0].set_title(scenario["title"].partition(" (")[0], fontsize=9)
        column[1].set(xlabel="requests at a time", ylabel="tokens verified per request")
        column[1].set_ylim(0, 6.5)
        column[1].axvspan(150, 200, color="#dddddd", label="knee in the paper")
        for axis in column:
            axis.grid(alpha=0.3, linewidth=0.5)
            axis.legend(fontsize=8)
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results")
