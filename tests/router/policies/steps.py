"""Random steps to try policies on: ties, zeros, ragged blocks, weights, cliffs, tight room."""

from __future__ import annotations

from typing import Any

import numpy as np

from router.policies import PolicyInput


def make_step(
    survival: Any,
    step_s: Any = None,
    *,
    num_fixed_tokens: int = 0,
    num_drafts: Any = None,
    deterministic: bool = True,
    weight: Any = None,
    rids: Any = None,
) -> PolicyInput:
    """A step; by default of whole blocks, equal weights, and tokens that cost nothing."""
    survival_RG = np.array(survival, np.float64)
    num_rows, gamma = survival_RG.shape
    if step_s is None:
        step_s = np.ones(num_rows + num_fixed_tokens + survival_RG.size + 1)
    return PolicyInput(
        survival_RG=survival_RG,
        num_drafts_R=np.full(num_rows, gamma) if num_drafts is None else np.array(num_drafts),
        deterministic_R=np.full(num_rows, deterministic),
        weight_R=np.ones(num_rows) if weight is None else np.array(weight, np.float64),
        rids=np.arange(num_rows) if rids is None else np.array(rids),
        step_s_B=np.array(step_s, np.float64),
        num_fixed_tokens=num_fixed_tokens,
    )


def random_step(
    rng: np.random.Generator, *, weighted: bool = True, deterministic: bool = True
) -> PolicyInput:
    """Up to 5 rows of up to 6 drafts, coarse confidences (hence ties), costs with cliffs."""
    num_rows, gamma = int(rng.integers(0, 6)), int(rng.integers(0, 7))
    num_drafts = rng.integers(0, gamma + 1, num_rows)
    grid = [0.0, 0.25, 0.5, 0.5, 0.9, 1.0] if rng.random() < 0.5 else rng.random(40)
    confidence = rng.choice(grid, (num_rows, gamma))
    confidence[np.arange(gamma) >= num_drafts[:, None]] = 0.0
    fixed = int(rng.integers(0, 5))
    size = num_rows + fixed + int(rng.integers(0, num_rows * gamma + 3))
    return make_step(
        confidence.cumprod(axis=1),
        random_costs(rng, size),
        num_fixed_tokens=fixed,
        num_drafts=num_drafts,
        deterministic=deterministic,
        weight=rng.choice([0.25, 1.0, 1.0, 3.0], num_rows) if weighted else None,
        rids=rng.permutation(100)[:num_rows],
    )


def random_costs(rng: np.random.Generator, size: int) -> np.ndarray:
    """Seconds of 0..size tokens: never falling, flat or steep, with a cliff here and there."""
    slope = rng.choice([0.0, 0.01, 0.1, 1.0])
    rises = slope * rng.random(size + 1)
    rises[rng.random(size + 1) < 0.15] += rng.random() * 2
    costs: np.ndarray = 0.1 + rng.random() + rises.cumsum()
    return costs


def walk_of(step: PolicyInput) -> list[tuple[float, int, int]]:
    """Drafts that gain something in fp32 as (-gain, row, place), in walk order."""
    gains = step.survival_RG.astype(np.float32) * step.weight_R[:, None].astype(np.float32)
    return sorted(
        (-float(gains[r, j]), r, j) for r, j in np.ndindex(gains.shape) if gains[r, j] > 0
    )
