"""One verifier's throughput profile as plain data: for RPC, JSON, tables and pictures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from cluster.errors import InvalidRequest
from cluster.step_costs import StepCosts

ALARMS: Final = {
    "flat": "the table hardly rises: by it, verifying never costs anything",
    "inert": "steps run, and the table stays what it was at start",
    "error": "predicted step times are more than 10% off",
}
"""What may be wrong with a profile, and what that means."""

_MAX_ITEMS: Final = 4096


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One executed step: what it held, what was predicted, how long it took."""

    num_rows: int
    num_tokens: int
    num_prefill: int
    sum_context: int
    num_pairs: int
    predicted_s: float
    """0 where nobody predicted."""
    step_s: float


@dataclass(frozen=True, kw_only=True)
class ProfileSnapshot:
    """``T = scale * (tier[tokens] + costs)``, at start and now, and how well it predicts."""

    fingerprint: str
    """Model, device, engine and version that it was measured with."""
    tokens: tuple[int, ...]
    """Batch sizes B of the tiers, rising."""
    prior_s: tuple[float, ...]
    """Seconds of a step of B tokens without the costs below, as measured at start."""
    live_s: tuple[float, ...]
    """The same as learnt since, ``scale`` included."""
    prior_costs: StepCosts
    live_costs: StepCosts
    """``scale`` included."""
    scale: float
    """How many times slower the machine is today than at start."""
    overhead_s: float
    """Mean time between two steps that nothing hides."""
    live: bool
    context_term: bool
    num_steps: int
    num_tier_steps: tuple[int, ...]
    """Steps that ran nearest to each tier."""
    median_error: float
    """Of |predicted - actual| / actual over the recent steps."""
    mean_error: float
    spread: float
    """The same error of repeated equal steps about each other: no prediction can be better."""
    alarms: tuple[str, ...]
    """Keys of `ALARMS`."""
    recent: tuple[StepRecord, ...] = ()
    """The latest steps, oldest first."""

    @property
    def fixed_s(self) -> float:
        """What a step costs before it does anything: the first tier."""
        return self.live_s[0]

    def to_json(self) -> dict[str, Any]:
        """Plain lists, numbers and strings."""
        return dataclasses.asdict(self, dict_factory=_plain)

    @staticmethod
    def from_json(value: object) -> ProfileSnapshot:
        """Read what `to_json` gave, possibly by way of a file or a network.

        Raises:
            InvalidRequest: it is something else.
        """
        fields = _checked(value, ProfileSnapshot, "profile")
        for name in ("prior_costs", "live_costs"):
            fields[name] = StepCosts(**_checked(fields[name], StepCosts, name))
        fields["recent"] = tuple(
            StepRecord(**_checked(item, StepRecord, "recent")) for item in fields["recent"]
        )
        snapshot = ProfileSnapshot(**fields)
        sizes = {len(snapshot.tokens), len(snapshot.prior_s), len(snapshot.live_s)}
        if sizes != {len(snapshot.num_tier_steps)} or not snapshot.tokens:
            raise InvalidRequest(f"profile: tiers of different lengths, {sorted(sizes)}")
        return snapshot


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in items}


def _checked(value: object, cls: type[Any], where: str) -> dict[str, Any]:
    """The fields of ``cls`` in ``value``, lists as tuples, numbers finite.

    Raises:
        InvalidRequest: other keys, or other types.
    """
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{where}: expected an object, got {type(value).__name__}")
    kinds = {field.name: str(field.type) for field in dataclasses.fields(cls)}
    if set(value) != set(kinds):
        odd = sorted(map(str, set(value) ^ set(kinds)))[:8]
        raise InvalidRequest(f"{where}: missing or unknown fields {odd}")
    return {name: _value(value[name], kind, f"{where}.{name}") for name, kind in kinds.items()}


def _value(value: Any, kind: str, where: str) -> Any:
    if kind.startswith("tuple["):
        if not isinstance(value, list | tuple) or len(value) > _MAX_ITEMS:
            raise InvalidRequest(f"{where}: expected a list of at most {_MAX_ITEMS}")
        item = kind.removeprefix("tuple[").removesuffix(", ...]")
        return tuple(_value(v, item, where) for v in value)
    wanted = {"int": int, "float": int | float, "str": str, "bool": bool}.get(kind, Mapping)
    if not isinstance(value, wanted) or (kind != "bool" and isinstance(value, bool)):
        raise InvalidRequest(f"{where}: expected {kind}, got {type(value).__name__}")
    if kind != "float":
        return value
    number = float(cast(float, value))
    if not math.isfinite(number):
        raise InvalidRequest(f"{where}: {number} is not a finite number")
    return number
