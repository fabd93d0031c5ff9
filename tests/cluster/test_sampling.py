"""What sampling parameters mean for others; their domain is tested where requests come in."""

from __future__ import annotations

import pytest

from cluster.sampling import REGIMES, regime_of
from tests.frames import make_sampling


@pytest.mark.parametrize(
    ("temperature", "mode", "regime"),
    [
        (0.0, "coupled", "greedy"),
        (0.0, "rejection", "greedy"),
        (0.7, "coupled", "coupled"),
        (1.0, "rejection", "rejection"),
    ],
)
def test_regime_of_a_request(temperature: float, mode: str, regime: str) -> None:
    assert regime_of(make_sampling(temperature=temperature, mode=mode)) == regime
    assert regime in REGIMES
