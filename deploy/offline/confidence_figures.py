"""How good a drafter's confidence is: ECE, AUC, Brier and reliability, position by position. Pure.

Asked of survival a_k (the product c_1...c_k, which the scheduler reads and calibration targets,
paper section 3.2.1) on all rounds that nothing could cut, and of the conditional c_k on those among
them that reached position k.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from deploy.offline.figures import Figure
from deploy.offline.round_table import F64, Bools, RoundTable
from drafter_service.calibration.metrics import auc, brier, ece, ece_noise, equal_mass_starts

POOLED: Final = "pooled"
_RELIABILITY_BINS: Final = 10


def confidence_figures(table: RoundTable) -> dict[str, list[Figure]]:
    """``ece``, ``auc`` and ``brier``, one figure per position; AUC also ``pooled`` over them."""
    figures: dict[str, list[Figure]] = {"ece": [], "auc": [], "brier": []}
    part = table.of(table.whole)
    survival_NG, survived_NG, drafted_NG = part.survival, part.survived, part.drafted
    reached_NG = part.reached
    for k in range(part.gamma):
        seen, reached = drafted_NG[:, k], reached_NG[:, k]
        if not reached.any():
            continue
        stated, happened = survival_NG[seen, k], survived_NG[seen, k]
        single, accepted = part.confidence[reached, k], survived_NG[reached, k]
        counts = {"position": k + 1, "rounds": int(seen.sum()), "reached": int(reached.sum())}
        figures["ece"].append(
            counts
            | {"survival": ece(stated, happened), "conditional": ece(single, accepted)}
            | {"survival_noise": ece_noise(stated), "conditional_noise": ece_noise(single)}
        )
        for name, measure in (("auc", auc), ("brier", brier)):
            values = {"survival": measure(stated, happened)}
            values["conditional"] = measure(single, accepted)
            figures[name].append(counts | values)
    if drafted_NG.any():
        figures["auc"].append(
            {
                "position": POOLED,
                "rounds": int(drafted_NG.sum()),
                "reached": int(reached_NG.sum()),
                "survival": auc(survival_NG[drafted_NG], survived_NG[drafted_NG]),
                "conditional": auc(part.confidence[reached_NG], survived_NG[reached_NG]),
            }
        )
    return figures


def reliability(table: RoundTable) -> list[Figure]:
    """Stated against observed survival at each position, in equally filled bins."""
    part = table.of(table.whole)
    survival_NG, survived_NG, drafted_NG = part.survival, part.survived, part.drafted
    figures = []
    for k in range(part.gamma):
        seen = drafted_NG[:, k]
        if seen.any():
            bins = _bins(survival_NG[seen, k], survived_NG[seen, k])
            figures.append({"position": k + 1, **bins})
    return figures


def _bins(stated_N: F64, happened_N: Bools) -> dict[str, list[float]]:
    order = np.argsort(stated_N, kind="stable")
    starts = equal_mass_starts(len(order), _RELIABILITY_BINS)
    sizes = np.diff([*starts, len(order)])
    return {
        "stated": (np.add.reduceat(stated_N[order], starts) / sizes).tolist(),
        "observed": (np.add.reduceat(happened_N[order].astype(float), starts) / sizes).tolist(),
        "rounds": sizes.tolist(),
    }
