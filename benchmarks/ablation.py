"""What each part of the scheduling is worth: one switched off at a time, in one running server.

    python benchmarks/ablation.py --out ablation.json [--minutes 25] [--prompts FILE.jsonl]

The embedded pair at two numbers of users, with all parts on and with one off, as in `pareto.py`. A
ratio over 1 says that the part is worth having; the bound is the lower 90% one. ``rejection``
compares acceptance modes at the same requests, whose texts differ above temperature 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import comparing

from cluster.errors import DSparkError
from dspark.bench.comparison import draw_ratios, rates_by_setting, ratios_to
from dspark.bench.interleaved import Setting

USERS = (4, 32)
ALL_ON = "all on"
SETTINGS = (
    Setting(name=ALL_ON),
    Setting(name="go when free", scheduling={"gather": "when_free"}),
    Setting(name="wait for all", scheduling={"gather": "wait_for_all"}),
    Setting(name="no late dispatch", scheduling={"late_dispatch": False}),
    Setting(name="no gating", scheduling={"gate_drafts": False}),
    Setting(name="start-up profile", scheduling={"live_profile": False}),
    Setting(name="no context term", scheduling={"context_term": False}),
    Setting(name="no recalibration", scheduling={"recalibrate": False}),
)
CONTROLS = (Setting(name="rejection", asked={"modes": ("rejection",)}),)


def summarise(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """Means, and ratios of everything on to one thing off."""
    others = [setting.name for setting in SETTINGS if setting.name != ALL_ON]
    controls = [block for block in blocks if block.get("control")]
    settings = [block for block in blocks if not block.get("control")]
    few = [block for block in blocks if block["users"] <= comparing.IN_BLOCKS]
    ratios = ratios_to(settings, ALL_ON, others)
    ratios += ratios_to([*few, *controls], ALL_ON, [setting.name for setting in CONTROLS])
    return {"rates": rates_by_setting(settings), "all_on_to": ratios}


def lines(summary: dict[str, Any]) -> Iterator[str]:
    """The summary as text."""
    for ratio in summary["all_on_to"]:
        lower = "" if ratio["lower"] is None else f", 90% bound {ratio['lower']:.3f}"
        sides = f"{ratio['users']:3d} users: all on / {ratio['to']:<17s}"
        yield f"{sides} = {ratio['ratio']:.3f}{lower}"


def draw(report: dict[str, Any]) -> bytes:
    """A bar per part and number of users."""
    return draw_ratios(
        report["summary"]["all_on_to"], f"all on over one part off, {report['machine']}"
    )


def main() -> int:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    comparing.add_arguments(parser, users=USERS)
    comparison = comparing.Comparison(
        settings=SETTINGS,
        controls=CONTROLS,
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
