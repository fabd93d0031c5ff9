"""Step curves and acceptance by name: of the design's sketches, the paper, the embedded pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from deploy.simulation.acceptance import Domain
from deploy.simulation.curves import StepCurve

CURVES: Final = {
    # DESIGN section 3.6: what the gather rule was sketched with.
    "memory_bound": StepCurve(fixed_s=0.020, per_token_s=10e-6),
    "mixed": StepCurve(fixed_s=0.010, per_token_s=100e-6),
    "compute_bound": StepCurve(fixed_s=0.001, per_token_s=200e-6),
    # A large target over several GPUs: weights are read in 36 ms, arithmetic takes over at 720
    # tokens, kernels come in tiles of 8; a row costs its share of sampling and attention.
    "large": StepCurve(
        fixed_s=0.004,
        memory_s=0.036,
        per_token_s=50e-6,
        per_row_s=20e-6,
        per_context_s=10e-9,
        tile_tokens=8,
    ),
    # A model of 8B on one accelerator of 3.35 TB/s: 16 GB of weights, then about 400 TFLOP/s.
    "one_h100": StepCurve(
        fixed_s=0.0015,
        memory_s=0.0055,
        per_token_s=40e-6,
        per_row_s=10e-6,
        per_context_s=40e-9,
        tile_tokens=8,
    ),
    # SmolLM2-135M in fp32 on two cores, prepacked weights: measured for this project.
    "laptop": StepCurve(
        table_tokens=(1, 2, 4, 6, 8, 16, 32, 64, 128),
        table_s=(0.058, 0.062, 0.065, 0.075, 0.088, 0.097, 0.144, 0.212, 0.334),
        per_row_s=0.0005,
        per_context_s=2e-6,
    ),
}

_DATASETS: Final = (
    "gsm8k", "math", "aime25", "mbpp", "humaneval", "lcb", "mt-bench", "alpaca", "arena-hard",
)  # fmt: skip
_TABLE_1: Final = {
    "eagle3": (5.14, 4.62, 3.92, 3.69, 4.16, 3.77, 2.39, 2.26, 2.55),
    "dflash": (5.40, 4.85, 4.15, 4.40, 4.74, 4.18, 3.07, 2.96, 2.83),
    "dspark": (6.11, 5.70, 4.89, 5.13, 5.38, 4.86, 3.64, 3.54, 3.29),
}
"""Accepted length at temperature 1, gamma 7, Qwen3-4B (paper Table 1)."""
_HOLD: Final = {"eagle3": 1.0, "dflash": 0.975, "dspark": 1.0}
"""Conditional acceptance at k + 1 over that at k (shapes of Figure 2: DFlash decays)."""
_GAMMA: Final = 7

_EMBEDDED: Final = {
    "greedy": {
        "math": (0.430, 0.516, 0.556, 0.603, 0.551),
        "code": (0.485, 0.499, 0.653, 0.482, 0.570),
        "chat": (0.280, 0.263, 0.344, 0.333, 0.462),
    },
    "coupled": {
        "math": (0.360, 0.386, 0.436, 0.385, 0.400),
        "code": (0.419, 0.422, 0.440, 0.395, 0.548),
        "chat": (0.255, 0.297, 0.353, 0.229, 0.200),
    },
    "rejection": {
        "math": (0.386, 0.445, 0.473, 0.372, 0.443),
        "code": (0.439, 0.439, 0.472, 0.403, 0.394),
        "chat": (0.281, 0.320, 0.285, 0.287, 0.348),
    },
}
"""The shipped drafter of SmolLM2-135M, 159 prompts (benchmarks/results/eval_default.json)."""


def paper_domain(drafter: str, dataset: str, gamma: int = _GAMMA) -> Domain:
    """Acceptance of Table 1's drafters, as a block of gamma drafts.

    Only the accepted length is published: the acceptance at position 1 is solved for, given how
    the drafter holds it from there on.
    """
    tau, hold = _TABLE_1[drafter][_DATASETS.index(dataset)], _HOLD[drafter]
    low, high = 0.01, 0.999
    for _ in range(60):
        first = (low + high) / 2
        length, survival = 1.0, 1.0
        for k in range(_GAMMA):
            survival *= first * hold**k
            length += survival
        low, high = (first, high) if length < tau else (low, first)
    acceptance = tuple(first * hold**k for k in range(gamma))
    return Domain(name=dataset, acceptance=acceptance)


def _paper(drafter: str, gamma: int) -> tuple[Domain, ...]:
    return tuple(paper_domain(drafter, dataset, gamma) for dataset in _DATASETS)


def _embedded(regime: str) -> tuple[Domain, ...]:
    return tuple(Domain(name=name, acceptance=p) for name, p in _EMBEDDED[regime].items())


DOMAINS: Final[dict[str, Callable[[], tuple[Domain, ...]]]] = {
    "paper_dspark": lambda: _paper("dspark", _GAMMA),
    "paper_dspark_5": lambda: _paper("dspark", 5),
    "paper_dflash": lambda: _paper("dflash", _GAMMA),
    "paper_eagle3": lambda: _paper("eagle3", _GAMMA),
    "paper_mtp1": lambda: _paper("eagle3", 1),
    "embedded_greedy": lambda: _embedded("greedy"),
    "embedded_coupled": lambda: _embedded("coupled"),
    "embedded_rejection": lambda: _embedded("rejection"),
}
"""Domains by name, equally weighted."""
