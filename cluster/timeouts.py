"""Time limits of calls: none means for ever."""

from __future__ import annotations

import math

from cluster.errors import ConfigError


def require_timeout(name: str, seconds: float) -> float:
    """Return ``seconds`` if it is a positive, finite time limit.

    Raises:
        ConfigError: zero, negative, infinite or NaN. Some libraries read such a value as "for
            ever"; here it is a mistake of the caller.
    """
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(
            f"{name}: {seconds} is not a time limit", hint="give a positive number of seconds"
        )
    return float(seconds)
