"""How a budget policy is spelt in the configuration: a name, and for some a colon and a number.

| text | verifies of each block |
|---|---|
| ``adaptive`` | whole blocks below the knee, above it ``retrospective`` or ``lagged`` |
| ``causal`` | the paper's Algorithm 1, with its early stop |
| ``lagged`` | a budget from earlier rounds, filled in the order of this step's survival |
| ``retrospective`` | the optimum over this step's own survival; refuses drafts that were drawn |
| ``fixed:K`` | the first K drafts |
| ``threshold:C`` | the drafts before the first one of a confidence below C |
| ``full`` | all |
| ``none`` | nothing |

`router.policies` makes them.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from cluster.errors import ConfigError

PLAIN_POLICIES: Final = ("adaptive", "causal", "lagged", "retrospective", "full", "none")
MAX_FIXED: Final = 64
"""Most drafts that ``fixed`` may ask for; no block is longer."""

_WHOLE: Final = re.compile(r"[0-9]{1,3}", re.ASCII)
_SHARE: Final = re.compile(r"[0-9]+(\.[0-9]+)?", re.ASCII)


class PolicyText(NamedTuple):
    """A policy as it was spelt."""

    name: str
    argument: float
    """0 where the policy takes none."""


def read_policy(text: str) -> PolicyText:
    """Read a policy.

    Raises:
        ConfigError: no such policy, or a number that it cannot work with.
    """
    name, colon, argument = text.partition(":")
    if name in PLAIN_POLICIES and not colon:
        return PolicyText(name, 0.0)
    if name == "fixed" and _WHOLE.fullmatch(argument) and int(argument) <= MAX_FIXED:
        return PolicyText(name, float(argument))
    if name == "threshold" and _SHARE.fullmatch(argument) and float(argument) <= 1:
        return PolicyText(name, float(argument))
    raise ConfigError(
        f"policy {text[:64]!r} is unknown",
        hint=f"one of {', '.join(PLAIN_POLICIES)}, fixed:K with K up to {MAX_FIXED}, "
        "threshold:C with C from 0 to 1",
    )
