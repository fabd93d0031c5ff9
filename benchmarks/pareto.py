"""Total against per-user tokens/s: how much of each block to verify, and whether to draft at all.

    python benchmarks/pareto.py --out pareto.json [--minutes 25] [--prompts FILE.jsonl]

One server with the embedded pair at 1, 4, 16 and 64 users; ``none`` (nothing is drafted),
``fixed:2``, ``fixed:4`` and ``full`` (always drafted, so many verified) and ``adaptive`` (all
defaults) are compared in blocks that ask the same (few users, `dspark.bench.interleaved`) or take
turns under one load (many, `dspark.bench.turns`). ``plain`` is ``none`` for requests that never
could be drafted for, whose features thus go nowhere: what keeping that door open costs. Where
settings take turns, ``none alone`` compares the two in a load where nothing else drafts. The report
holds every block, the means and the paired ratios with their lower 90% bounds, prompts levelled
(`dspark.bench.comparison.levelled`); ``best fixed`` is chosen at each number of users in hindsight.
Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import comparing

from cluster.errors import DSparkError
from dspark.bench.comparison import crowds, draw_frontier, rates_by_setting, ratios_to
from dspark.bench.interleaved import Setting

USERS = (1, 4, 16, 64)
FIXED = ("fixed:2", "fixed:4")
SETTINGS = (
    Setting(name="none", scheduling={"policy": "none"}),
    *(
        Setting(name=name, scheduling={"policy": name, "gate_drafts": False})
        for name in (*FIXED, "full")
    ),
    Setting(name="adaptive", scheduling={"policy": "adaptive"}),
)
PLAIN = Setting(name="plain", scheduling={"policy": "none"}, asked={"draft": False})
REQUIRED = {
    "none": dict.fromkeys(USERS, 0.97),
    "none alone": dict.fromkeys(USERS, 0.97),
    "plain": {1: 0.97, 4: 0.97},
    "full": {1: 0.97, 64: 1.15},
    "best fixed": dict.fromkeys(USERS, 0.97),
}
"""What the lower bounds should reach."""


def summarise(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """Means, and adaptive's ratios to everything else; a bound takes two pairs."""
    few = [b for b in blocks if b["users"] <= comparing.IN_BLOCKS]
    controls = [b for b in blocks if b.get("control")]
    alone = [b for b in blocks if b.get("alone")]
    settings = [
        b for b in blocks if not (b.get("control") or b.get("alone") or b["setting"] == PLAIN.name)
    ]
    ratios = ratios_to(settings, "adaptive", ("none", *FIXED, "full"))
    for users in crowds(settings):
        fixed = [r for r in ratios if r["users"] == users and r["to"] in FIXED]
        ratios.append(min(fixed, key=lambda r: float(r["ratio"])) | {"to": "best fixed"})
    ratios += ratios_to(few, "adaptive", (PLAIN.name,))
    ratios += [r | {"to": "none alone"} for r in ratios_to(alone, "adaptive", ("none",))]
    for ratio in ratios:
        required = REQUIRED.get(ratio["to"], {}).get(ratio["users"])
        if required is not None and ratio["lower"] is not None:
            ratio |= {"required": required, "holds": ratio["lower"] >= required}
    return {
        "rates": rates_by_setting(settings),
        "adaptive_to": ratios,
        "none_to_plain": ratios_to([*few, *controls], "none", (PLAIN.name,)),
    }


def lines(summary: dict[str, Any]) -> Iterator[str]:
    """The summary as text."""
    for row in summary["rates"]:
        length = row["accepted_length"] or 0.0
        yield (
            f"{row['users']:3d} users {row['setting']:<9s} {row['tokens_per_s_total']:7.1f} "
            f"tokens/s in all {row['tokens_per_s_user']:7.2f} per user, accepted {length:.2f}, "
            f"{row['verified_per_round'] or 0.0:.2f} drafts verified per round"
        )
    for ours, ratios in (("adaptive", "adaptive_to"), ("none", "none_to_plain")):
        for ratio in summary[ratios]:
            lower = "" if ratio["lower"] is None else f", 90% bound {ratio['lower']:.3f}"
            verdict = "" if "holds" not in ratio else ("  ok" if ratio["holds"] else "  MISSED")
            sides = f"{ratio['users']:3d} users: {ours} / {ratio['to']:<10s}"
            yield f"{sides} = {ratio['ratio']:.3f}{lower}, raw {ratio['raw_ratio']:.3f}{verdict}"


def draw(report: dict[str, Any]) -> bytes:
    """The frontier."""
    order = [setting["name"] for setting in report["plan"]["settings"]]
    return draw_frontier(
        report["summary"]["rates"], order, f"{report['machine']}, closed loop, interleaved"
    )


def main() -> int:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    comparing.add_arguments(parser, users=USERS)
    comparison = comparing.Comparison(
        settings=SETTINGS,
        controls=(PLAIN,),
        alone=("none", "adaptive"),
        users=USERS,
        summarise=summarise,
        lines=lines,
        draw=draw,
    )
    try:
        comparing.run(parser.parse_args(), comparison)
    except DSparkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
