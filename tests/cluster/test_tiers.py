"""Target rates and tiers that are taken, and those that are not."""

from __future__ import annotations

import math

import pytest

from cluster.errors import InvalidRequest
from cluster.tiers import MAX_TARGET_RATE, STANDARD, TIER_WEIGHTS, check_service, tier_weight


def test_the_usual_tier_is_the_standard_one_and_the_others_lie_around_it() -> None:
    assert tier_weight("") == tier_weight(STANDARD) == 1.0
    assert tier_weight("batch") < 1.0 < tier_weight("interactive")
    for tier in ("", *TIER_WEIGHTS):
        check_service(0.0, tier)
    check_service(MAX_TARGET_RATE, "")


@pytest.mark.parametrize("rate", [-1.0, math.nan, math.inf, 2 * MAX_TARGET_RATE])
def test_impossible_rates_are_refused(rate: float) -> None:
    with pytest.raises(InvalidRequest, match="tokens/s"):
        check_service(rate, "")


def test_an_unknown_tier_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"'gold' is unknown.*interactive"):
        check_service(0.0, "gold")
