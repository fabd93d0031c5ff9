"""Calibrations by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cluster.fingerprint import folder_fingerprint
from cluster.sampling import REGIMES
from drafter_service.calibration.calibration import Calibration, RegimeCalibration
from drafter_service.calibration.scaling import Scaling


def make_calibration(gamma: int, *, fingerprint: str = "f", seed: int = 0) -> Calibration:
    """Other temperatures, offsets and bends for every regime and position, not measured."""
    rng = np.random.default_rng(seed)
    return Calibration(
        fingerprint=fingerprint,
        regimes={
            regime: RegimeCalibration(
                scaling=Scaling(
                    method="temperature+offset+bend",
                    temperatures=tuple(rng.uniform(0.5, 2, gamma).tolist()),
                    offsets=tuple(rng.uniform(-1, 1, gamma).tolist()),
                    bend=float(rng.uniform(0.3, 1.2)),
                ),
                judgement=None,
            )
            for regime in REGIMES
        },
    )


def calibration_of(checkpoint: Path, gamma: int) -> Calibration:
    """One that belongs to the weights in a folder."""
    return make_calibration(gamma, fingerprint=folder_fingerprint(checkpoint))
