"""Sequential Temperature Scaling (paper section 3.2.1): fit and application.

``c_k = sigmoid(logit_k / T_k)``. For k = 1..gamma in turn, with what was found for earlier
positions fixed, T_k is searched on a grid for the least calibration error (ECE) of the *product*
c_1...c_k against survival. Nothing found at k looks at positions after k.

Where we go beyond the paper:

* **Noise.** Binned errors are noisy: over hundreds of rounds their least value is mostly luck, and
  luck at k would be made up for at k + 1. So the search has a home, the likeliest T_k of the rounds
  that reached k (under a prior around the position before, which is all there is where none did),
  and leaving it by a factor of 2 must gain more than the error that chance alone shows. In planted
  simulations this halves the error on fresh rounds of fits to 400-2000 rounds, and it vanishes
  as rounds grow. With fewer than `MIN_REACHED` rounds a position takes over the values of the
  one before (the first: none).
* **Offset.** A temperature leaves a confidence of 1/2 where it is, so it cannot mend a head that is
  off to one side. Ours is by construction: it learns the acceptance of rejection at temperature 1;
  coupled mode accepts less often, temperature 0 differently. Method ``temperature+offset`` has
  ``c_k = sigmoid(logit_k / T_k + b_k)``, still order-preserving. The search stays one-dimensional:
  for each T_k, b_k is the likeliest one. It is used only if it lowers the error on prompts left
  out of the fit.
* **Bend.** A head may know less the surer it is: no draft holds with more than the share of tokens
  that a reduced draft vocabulary covers, whatever the logit. Method ``temperature+offset+bend`` has
  ``bend(z) = -softplus(-z) + bend * softplus(z)`` in place of the logit z: another slope above a
  confidence of 1/2 than below, smoothly joined (for one position, beta calibration, Kull et al.
  2017). One number per regime, from a small grid, and again only if left-out prompts gain by it.
* **Bins.** Equally filled ones: deep products lie near 0, in a single bin of equal width.

Shape legend: N rounds, G gamma, T temperatures of the grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from drafter_service.calibration.metrics import ece, equal_mass_ece, equal_mass_noise
from drafter_service.calibration.samples import F64, Bools, Samples, sigmoid

Method = Literal["temperature", "temperature+offset", "temperature+offset+bend"]

MIN_TEMPERATURE: Final = 0.2
MAX_TEMPERATURE: Final = 5.0
MAX_OFFSET: Final = 3.0
MIN_BEND: Final = 0.2
MAX_BEND: Final = 2.0
MIN_REACHED: Final = 30
"""Rounds that must have reached a position for it to get values of its own."""

_GRID_T: Final = np.geomspace(MIN_TEMPERATURE, MAX_TEMPERATURE, 65)  # 5% apart
_BENDS: Final = (0.3, 0.42, 0.6, 0.8)
_PRIOR_SPREAD: Final = 0.5
"""Standard deviation of ln T_k and of b_k around the values of the position before."""
_MIN_GAIN: Final = 0.001
"""Mean error on left-out prompts by which an offset must be better: less changes no schedule."""
_MIN_BEND_GAIN: Final = 0.001
"""Error at the worst position, which is mostly the first, by which a bend must be better."""
_NUM_FOLDS: Final = 4


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Values of one regime."""

    method: Method
    temperatures: tuple[float, ...]  # G
    offsets: tuple[float, ...]  # G, all 0 with method ``temperature``
    bend: float = 1.0
    """Slope above a confidence of 1/2 over that below; 1 but with the method of that name."""
    borrowed: tuple[int, ...] = ()
    """Positions, from 1, with too few rounds for values of their own."""

    def apply(self, logit_NG: F64) -> F64:
        """Calibrated conditional confidence [N, G]."""
        bent_NG = bent(logit_NG, self.bend)
        return sigmoid(bent_NG / np.array(self.temperatures) + np.array(self.offsets))


def bent(logit: F64, bend: float | F64) -> F64:
    """Logits with the slope 1 far below 0 and ``bend`` far above; unchanged with a bend of 1."""
    bent: F64 = logit + (np.asarray(bend) - 1.0) * np.logaddexp(0.0, logit)
    return bent


def fit(samples: Samples) -> Scaling:
    """The scaling of one regime: temperatures, and offsets and a bend where they pay."""
    num_folds = min(_NUM_FOLDS, len(np.unique(samples.prompt)))
    if num_folds < 2:
        return fit_method(samples, "temperature")
    best: tuple[Method, float] = "temperature", 1.0
    errors_G = left_out_errors(samples, *best, num_folds)
    with_offset_G = left_out_errors(samples, "temperature+offset", 1.0, num_folds)
    if errors_G.mean() - with_offset_G.mean() > _MIN_GAIN:
        best, errors_G = ("temperature+offset", 1.0), with_offset_G
    worst = {
        bend: left_out_errors(samples, "temperature+offset+bend", bend, num_folds).max()
        for bend in _BENDS
    }
    bend = min(worst, key=worst.__getitem__)
    if errors_G.max() - worst[bend] > _MIN_BEND_GAIN:
        best = "temperature+offset+bend", bend
    return fit_method(samples, *best)


def left_out_errors(samples: Samples, method: Method, bend: float, num_folds: int) -> F64:
    """The product's `ece` at each position that was seen, each round judged by a fit without its
    prompt."""
    fold_N = samples.folds(num_folds)
    confidence_NG = np.empty_like(samples.logit)
    for fold in range(num_folds):
        out_N = fold_N == fold
        scaling = fit_method(samples.of(~out_N), method, bend)
        confidence_NG[out_N] = scaling.apply(samples.logit[out_N])
    product_NG, survived_NG = confidence_NG.cumprod(axis=1), samples.survived
    return np.array(
        [
            ece(product_NG[seen_N, k], survived_NG[seen_N, k])
            for k, seen_N in enumerate(samples.observable.T)
            if seen_N.any()
        ]
    )


def fit_method(samples: Samples, method: Method, bend: float = 1.0) -> Scaling:
    """Fit left to right, with or without offsets, the bend given."""
    temperature, offset = 1.0, 0.0
    temperatures, offsets, borrowed = [], [], []
    product_N = np.ones(len(samples))
    logit_NG = bent(samples.logit, bend)
    for k in range(samples.gamma):
        position = _Position(
            logit=logit_NG[:, k],
            survived=samples.survived[:, k],
            observable=samples.observable[:, k],
            reached=samples.reached[:, k],
            before=product_N,
            previous=(temperature, offset),
            with_offset=method != "temperature",
        )
        if position.reached.sum() < MIN_REACHED:
            borrowed.append(k + 1)
        else:
            temperature, offset = position.search()
        temperatures.append(temperature)
        offsets.append(offset)
        product_N = product_N * sigmoid(logit_NG[:, k] / temperature + offset)
    return Scaling(
        method=method,
        temperatures=tuple(temperatures),
        offsets=tuple(offsets),
        bend=bend,
        borrowed=tuple(borrowed),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Position:
    """The rounds as one position sees them, and the search over its temperature."""

    logit: F64  # N
    survived: Bools  # N
    observable: Bools  # N
    reached: Bools  # N
    before: F64  # N, calibrated product of the positions before
    previous: tuple[float, float]
    """Temperature and offset of the position before."""
    with_offset: bool

    def search(self) -> tuple[float, float]:
        """The temperature of least product error, near the likeliest; and its offset."""
        offset_T = self._likeliest_offsets()
        home = int(self._surprise(offset_T).argmin())
        noise = equal_mass_noise(self._product(home, offset_T))
        survived_N = self.survived[self.observable]
        away_T = np.log2(_GRID_T / _GRID_T[home]) ** 2
        cost_T = [
            equal_mass_ece(self._product(at, offset_T), survived_N) + noise * away_T[at]
            for at in range(len(_GRID_T))
        ]
        best = int(np.argmin(cost_T))
        return float(_GRID_T[best]), float(offset_T[best])

    def _product(self, at: int, offset_T: F64) -> F64:
        """c_1...c_k of the observable rounds with the values at one place of the grid."""
        logit_N = self.logit[self.observable]
        return self.before[self.observable] * sigmoid(logit_N / _GRID_T[at] + offset_T[at])

    def _surprise(self, offset_T: F64) -> F64:
        """Minus the log of likelihood (of the rounds that reached here) times prior."""
        x_TN = self.logit[self.reached] / _GRID_T[:, None] + offset_T[:, None]
        loss_TN = np.logaddexp(0.0, np.where(self.survived[self.reached], -x_TN, x_TN))
        away_T = np.log(_GRID_T / self.previous[0]) ** 2 + (offset_T - self.previous[1]) ** 2
        total_T: F64 = loss_TN.sum(axis=1) + away_T / (2 * _PRIOR_SPREAD**2)
        return total_T

    def _likeliest_offsets(self) -> F64:
        """For each temperature, where the slope of `_surprise` along the offset is 0. The slope
        rises, so bisection finds it."""
        low_T = np.full(len(_GRID_T), -MAX_OFFSET if self.with_offset else 0.0)
        high_T = -low_T
        scaled_TN = self.logit[self.reached] / _GRID_T[:, None]
        num_survived = self.survived[self.reached].sum()
        for _ in range(14 if self.with_offset else 0):
            middle_T = (low_T + high_T) / 2
            slope_T = sigmoid(scaled_TN + middle_T[:, None]).sum(axis=1) - num_survived
            slope_T += (middle_T - self.previous[1]) / _PRIOR_SPREAD**2
            low_T = np.where(slope_T < 0, middle_T, low_T)
            high_T = np.where(slope_T < 0, high_T, middle_T)
        found_T: F64 = (low_T + high_T) / 2
        return found_T
