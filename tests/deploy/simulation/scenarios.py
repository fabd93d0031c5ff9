"""Small scenarios for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deploy.simulation.scenario import Scenario, load_scenario
from deploy.simulation.tally import Tally
from deploy.simulation.world import World

EXACT: dict[str, Any] = {
    "duration_s": 20.0,
    "warmup_s": 4.0,
    "router": {"explore_fraction": 0.0, "scheduling": {"gate_drafts": False}},
    "verifier": {"curve": {"fixed_s": 0.02, "per_token_s": 0.001}, "jitter": 0.0},
    "drafter": {"curve": {"fixed_s": 0.005, "per_block_s": 0.001}, "jitter": 0.0},
    "links": {"latency_s": 0.0, "jitter_s": 0.0},
    "acceptance": {
        "domains": [{"acceptance": [0.999999] * 4}],
        "request_sd": 0.0,
        "drift_sd": 0.0,
        "position_sd": 0.0,
    },
    "trace": {
        "kind": "closed",
        "users": 1,
        "prompt": {"kind": "fixed", "mean": 16},
        "output": {"kind": "fixed", "mean": 100_000},
    },
}
"""Nothing is left to chance, drafts are right, and one answer goes on for ever."""


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with some values changed."""
    tree = dict(base)
    for key, value in change.items():
        inner = tree.get(key)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        tree[key] = merged(inner, value) if both else value  # type: ignore[arg-type]
    return tree


def exact(**change: Any) -> Scenario:
    """`EXACT` with some sections changed."""
    return load_scenario(merged(EXACT, change))


def played(scenario: Scenario) -> Tally:
    """The only cell, to its end."""
    return World(scenario).run()
