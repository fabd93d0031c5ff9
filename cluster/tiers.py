"""Tiers of service: how much a request counts beside others when verification is scarce."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from cluster.errors import InvalidRequest

STANDARD: Final = "standard"
"""Of requests that name no tier."""

TIER_WEIGHTS: Final = MappingProxyType({STANDARD: 1.0, "interactive": 4.0, "batch": 0.25})
"""By name: a draft token of this tier is worth so many of a standard one of equal survival."""

MAX_TARGET_RATE: Final = 1e6
"""New tokens per second that a request may ask for; beyond it is a mistake of units."""


def tier_weight(tier: str) -> float:
    """The weight of a tier that has been checked; empty is `STANDARD`."""
    return TIER_WEIGHTS[tier or STANDARD]


def check_service(target_rate: float, tier: str) -> None:
    """Refuse a target rate (tokens/s, 0 for none) or a tier that cannot be honoured.

    Raises:
        InvalidRequest: the rate is negative, not finite or over `MAX_TARGET_RATE`, or there is no
            such tier.
    """
    if not 0 <= target_rate <= MAX_TARGET_RATE:  # nor a NaN
        raise InvalidRequest(
            f"target of {target_rate} tokens/s", hint=f"over 0, at most {MAX_TARGET_RATE:.0f}"
        )
    if tier and tier not in TIER_WEIGHTS:
        known = ", ".join(TIER_WEIGHTS)
        raise InvalidRequest(f"tier {tier[:64]!r} is unknown", hint=f"one of {known}")
