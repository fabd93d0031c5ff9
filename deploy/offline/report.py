"""The report of an evaluation, as the JSON file holds it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from deploy.offline import figures
from deploy.offline.confidence_figures import confidence_figures, reliability
from deploy.offline.evaluation import Measured, Plan
from deploy.offline.figures import Figure
from deploy.offline.round_table import RoundTable

Report = dict[str, Any]

_PER_RUN: dict[str, Callable[[RoundTable], list[Figure]]] = {
    "rows": figures.lengths_by_source,
    "domains": figures.lengths_by_domain,
    "positions": figures.acceptance_by_position,
    "depths": figures.length_by_depth,
    "thresholds": figures.threshold_sweep,
    "reliability": reliability,
}


def make_report(plan: Plan, measured: Sequence[Measured], setup: dict[str, Any]) -> Report:
    """All figures of all runs; every one names its drafter, temperature and mode.

    ``rows`` has accepted length by data set, ``domains`` by domain, ``comparisons`` each drafter
    over the first one on the same prompts, ``positions`` conditional acceptance, ``depths`` and
    ``batches`` accepted length against context depth and drafter batch, ``thresholds`` the sweep,
    ``ece``, ``auc``, ``brier`` and ``reliability`` what confidence is worth at each position.

    Args:
        setup: what was run, to be kept at the head.
    """
    regimes = [one for one in measured if one.draft_batch is None and len(one.table)]
    report: Report = {
        **setup,
        "max_new_tokens": plan.max_new_tokens,
        "concurrency": plan.concurrency,
        "seed": plan.seed,
        "lost_sessions": sum(one.num_lost for one in measured),
    }
    for name, figures_of in _PER_RUN.items():
        report[name] = [one.labels | f for one in regimes for f in figures_of(one.table)]
    report["comparisons"] = _comparisons(regimes)
    report["batches"] = _batches(measured)
    report |= {"ece": [], "auc": [], "brier": []}
    for one in regimes:
        for name, listed in confidence_figures(one.table).items():
            report[name] += [one.labels | figure for figure in listed]
    return report


def _comparisons(regimes: Sequence[Measured]) -> list[Figure]:
    """Each drafter's accepted length over the first one's, in the same regime."""
    if not regimes:
        return []
    base = {one.regime: one for one in regimes if one.drafter == regimes[0].drafter}
    return [
        one.labels | {"over": regimes[0].drafter} | figure
        for one in regimes
        if one.drafter != regimes[0].drafter and one.regime in base
        for figure in figures.quotients(one.table, base[one.regime].table)
    ]


def _batches(measured: Sequence[Measured]) -> list[Figure]:
    found = []
    for one in measured:
        if one.draft_batch is not None and (figure := figures.whole_length(one.table)):
            found.append(one.labels | {"draft_batch": one.draft_batch} | figure)
    return found
