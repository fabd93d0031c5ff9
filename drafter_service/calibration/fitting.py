"""From the rounds of one regime to its calibration, judged on prompts that no fit has seen.

Shape legend: N rounds, G gamma.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from cluster.errors import ConfigError
from drafter_service.calibration import scaling
from drafter_service.calibration.calibration import RegimeCalibration
from drafter_service.calibration.figures import Judgement, figures
from drafter_service.calibration.samples import F64, Samples, sigmoid

MIN_PROMPTS: Final = 8
MIN_ROUNDS: Final = 200


@dataclass(frozen=True, kw_only=True, eq=False)
class Fitted:
    """A regime's calibration, and what its figures were computed from."""

    calibration: RegimeCalibration
    samples: Samples
    left_out: F64
    """[N, G] confidence of each round, calibrated without its prompt."""


def fit_regime(samples: Samples, *, temperature: float) -> Fitted:
    """Fit to all rounds. The judgement is of fits to half of the prompts, on the other half: close
    to what fresh prompts will see, and rather worse, for the stored values saw twice the rounds.

    Args:
        temperature: that the requests had, for the record.

    Raises:
        ConfigError: too few prompts or rounds to tell anything.
    """
    _check_enough(samples)
    left_out = left_out_confidence(samples)
    judgement = Judgement(
        temperature=temperature,
        num_prompts=len(np.unique(samples.prompt)),
        num_rounds=tuple(samples.observable.sum(axis=0).tolist()),
        num_reached=tuple(samples.reached.sum(axis=0).tolist()),
        before=figures(sigmoid(samples.logit), samples),
        after=figures(left_out, samples),
    )
    return Fitted(
        calibration=RegimeCalibration(scaling=scaling.fit(samples), judgement=judgement),
        samples=samples,
        left_out=left_out,
    )


def left_out_confidence(samples: Samples) -> F64:
    """Calibrated confidence [N, G] of each round by a fit to the other half of the prompts."""
    half_N = samples.folds(2)
    confidence_NG = np.empty_like(samples.logit)
    for half in (0, 1):
        fitted = scaling.fit(samples.of(half_N != half))
        confidence_NG[half_N == half] = fitted.apply(samples.logit[half_N == half])
    return confidence_NG


def _check_enough(samples: Samples) -> None:
    num_prompts, num_rounds = len(np.unique(samples.prompt)), int(samples.observable[:, 0].sum())
    if num_prompts < MIN_PROMPTS or num_rounds < MIN_ROUNDS:
        raise ConfigError(
            f"{num_rounds} rounds of {num_prompts} prompts are too few to calibrate with",
            hint=f"at least {MIN_ROUNDS} rounds of {MIN_PROMPTS} prompts, better thousands: "
            "more prompts, or longer answers",
        )
