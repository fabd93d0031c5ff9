"""`Calibration`: which temperatures, offsets and bends a request's confidence gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cluster.errors import CheckpointError
from cluster.sampling import REGIMES, regime_of
from cluster.wire import F32, Sampling
from drafter_service.calibration.figures import Judgement
from drafter_service.calibration.samples import logit, sigmoid
from drafter_service.calibration.scaling import Scaling, bent


@dataclass(frozen=True, kw_only=True)
class RegimeCalibration:
    """One regime's values and what they were worth when they were fitted."""

    scaling: Scaling
    judgement: Judgement | None
    """None for values that were not measured."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The scalings of a drafter, as ``calibration.json`` holds them."""

    fingerprint: str
    """Of the checkpoint that it was fitted to (`cluster.fingerprint`)."""
    regimes: Mapping[str, RegimeCalibration]
    """Exactly `REGIMES`, all with the same number of positions."""

    @property
    def gamma(self) -> int:
        """Positions of a block."""
        return len(self.regimes[REGIMES[0]].scaling.temperatures)

    def check(self, gamma: int) -> None:
        """Refuse to serve a drafter of blocks of another length.

        Raises:
            CheckpointError: ``gamma`` is not ours.
        """
        if self.gamma != gamma:
            raise CheckpointError(
                f"a calibration of {self.gamma} positions, the drafter has {gamma}",
                hint="run `dspark calibrate` on this drafter",
            )

    def apply(self, confidence_SG: F32, samplings: Sequence[Sampling]) -> F32:
        """Calibrated conditional confidence [S, G] of sessions with these parameters.

        Args:
            confidence_SG: raw, as the head gave it, in [0, 1].
        """
        chosen = [self.regimes[regime_of(sampling)].scaling for sampling in samplings]
        temperature_SG = np.array([scaling.temperatures for scaling in chosen])
        offset_SG = np.array([scaling.offsets for scaling in chosen])
        bend_S1 = np.array([[scaling.bend] for scaling in chosen])
        logit_SG = bent(logit(confidence_SG), bend_S1)
        return sigmoid(logit_SG / temperature_SG + offset_SG).astype(np.float32)
