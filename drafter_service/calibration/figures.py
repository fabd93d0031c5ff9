"""How good confidences are, position by position.

Shape legend: N rounds, G gamma.
"""

from __future__ import annotations

from dataclasses import dataclass

from drafter_service.calibration.metrics import auc, brier, ece, ece_noise
from drafter_service.calibration.samples import F64, Samples

Column = tuple[float | None, ...]
"""One value per position; None where no round counts (or, for AUC, only one outcome occurred)."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of the products c_1...c_k against survival, at each position; AUC also pooled."""

    ece: Column  # G
    auc: Column  # G
    brier: Column  # G
    ece_noise: Column  # G, the ECE that chance alone would give a perfect confidence
    pooled_auc: float | None
    """Of all products of all positions against survival."""
    pooled_conditional_auc: float | None
    """Of all single c_k against acceptance, where reached."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Confidence before and after calibration, on prompts that the fit has not seen."""

    temperature: float
    """Of the requests: what the figures, and strictly the fit, hold for."""
    num_prompts: int
    num_rounds: tuple[int, ...]  # G, that count for survival
    num_reached: tuple[int, ...]  # G, that count for conditional acceptance
    before: Figures
    after: Figures


def figures(confidence_NG: F64, samples: Samples) -> Figures:
    """Judge conditional confidences [N, G] of these rounds."""
    product_NG, survived_NG = confidence_NG.cumprod(axis=1), samples.survived
    seen_NG, reached_NG = samples.observable, samples.reached
    columns: dict[str, list[float | None]] = {"ece": [], "auc": [], "brier": [], "ece_noise": []}
    for k, seen_N in enumerate(seen_NG.T):
        stated, happened = product_NG[seen_N, k], survived_NG[seen_N, k]
        some = bool(seen_N.any())
        columns["ece"].append(ece(stated, happened) if some else None)
        columns["auc"].append(auc(stated, happened) if some else None)
        columns["brier"].append(brier(stated, happened) if some else None)
        columns["ece_noise"].append(ece_noise(stated) if some else None)
    return Figures(
        **{name: tuple(column) for name, column in columns.items()},
        pooled_auc=auc(product_NG[seen_NG], survived_NG[seen_NG]),
        pooled_conditional_auc=auc(confidence_NG[reached_NG], survived_NG[reached_NG]),
    )
