"""How far stated confidence is from what happened: ECE, AUC, Brier score.

All take a confidence in [0, 1] and an outcome of 0 or 1 per sample, [N] each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_BINS = 15


def ece(confidence: ArrayLike, outcome: ArrayLike, num_bins: int = NUM_BINS) -> float:
    """Expected calibration error over bins of equal width (Guo et al. 2017, equation 3).

    The mean over samples of |mean confidence - mean outcome| of the sample's bin. Bins are
    [i/n, (i+1)/n); a confidence of 1 is in the last. Empty bins count for nothing.

    Raises:
        ValueError: no samples, unequal lengths, or values outside [0, 1].
    """
    confidence_N, outcome_N = _checked(confidence, outcome)
    bin_N = np.minimum((confidence_N * num_bins).astype(np.int64), num_bins - 1)
    gap_B = np.bincount(bin_N, confidence_N - outcome_N, num_bins)
    return float(np.abs(gap_B).sum() / len(confidence_N))


def equal_mass_ece(confidence: ArrayLike, outcome: ArrayLike, num_bins: int = NUM_BINS) -> float:
    """Expected calibration error over bins of equally many samples. Raises like `ece`.

    The product of many confidences lies near 0, where all of it shares one bin of equal width;
    equally filled bins tell its values apart (Nixon et al. 2019).
    """
    confidence_N, outcome_N = _checked(confidence, outcome)
    order_N = np.argsort(confidence_N, kind="stable")
    gap_N = (confidence_N - outcome_N)[order_N]
    starts_B = equal_mass_starts(len(gap_N), num_bins)
    return float(np.abs(np.add.reduceat(gap_N, starts_B)).sum() / len(gap_N))


def equal_mass_starts(num_samples: int, num_bins: int) -> NDArray[np.int64]:
    """First index of each bin of sorted samples; fewer bins than asked for if samples are few."""
    num_bins = min(num_bins, num_samples)
    return np.arange(num_bins, dtype=np.int64) * num_samples // num_bins


def ece_noise(confidence: ArrayLike, num_bins: int = NUM_BINS) -> float:
    """The `ece` that a *perfect* confidence would be expected to show: sampling noise alone.

    A bin's summed gap is then about normal with variance sum p(1-p), whose mean absolute value is
    sqrt(2/pi) deviations. An `ece` near this figure is as good as can be told with this many
    samples. Raises like `ece`.
    """
    confidence_N, _ = _checked(confidence, np.zeros_like(confidence))
    bin_N = np.minimum((confidence_N * num_bins).astype(np.int64), num_bins - 1)
    variance_B = np.bincount(bin_N, confidence_N * (1 - confidence_N), num_bins)
    return float(np.sqrt(2 / np.pi * variance_B).sum() / len(confidence_N))


def equal_mass_noise(confidence: ArrayLike, num_bins: int = NUM_BINS) -> float:
    """What `ece_noise` is to `ece`, for `equal_mass_ece`."""
    confidence_N, _ = _checked(confidence, np.zeros_like(confidence))
    confidence_N = np.sort(confidence_N)
    variance_B = np.add.reduceat(
        confidence_N * (1 - confidence_N), equal_mass_starts(len(confidence_N), num_bins)
    )
    return float(np.sqrt(2 / np.pi * variance_B).sum() / len(confidence_N))


def auc(confidence: ArrayLike, outcome: ArrayLike) -> float | None:
    """Probability that a random success has more confidence than a random failure, ties half.

    None when only one of the two outcomes occurs. Raises like `ece`.
    """
    confidence_N, outcome_N = _checked(confidence, outcome)
    won = outcome_N == 1
    num_won, num_lost = int(won.sum()), int((~won).sum())
    if not num_won or not num_lost:
        return None
    _, value_N, count_U = np.unique(confidence_N, return_inverse=True, return_counts=True)
    rank_U = count_U.cumsum() - (count_U - 1) / 2  # mean rank, from 1, of each distinct value
    rank_sum = float(rank_U[value_N][won].sum())
    return (rank_sum - num_won * (num_won + 1) / 2) / (num_won * num_lost)


def brier(confidence: ArrayLike, outcome: ArrayLike) -> float:
    """Mean squared distance of confidence from outcome. Raises like `ece`."""
    confidence_N, outcome_N = _checked(confidence, outcome)
    return float(np.square(confidence_N - outcome_N).mean())


def _checked(
    confidence: ArrayLike, outcome: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    confidence_N = np.asarray(confidence, np.float64)
    outcome_N = np.asarray(outcome, np.float64)
    if confidence_N.ndim != 1 or confidence_N.shape != outcome_N.shape or not confidence_N.size:
        raise ValueError(f"confidence {confidence_N.shape} and outcome {outcome_N.shape}")
    if not ((confidence_N >= 0) & (confidence_N <= 1)).all():  # False for NaN too
        raise ValueError("a confidence is outside [0, 1]")
    if not ((outcome_N == 0) | (outcome_N == 1)).all():
        raise ValueError("an outcome is neither 0 nor 1")
    return confidence_N, outcome_N
