"""Step times of both engines by themselves: B requests of n drafts each, `Engine.measure_step`.

Both are loaded in one process and share its threads; they take turns in every repeat, so that both
see the same noise of the machine. Nothing else runs: no drafter, no router.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.config import Config
from cluster.environment import use_threads
from dspark.bench.figures import Figure

if TYPE_CHECKING:  # imports torch, and threads must be set before that
    from verifier_service.engine import StepShape

REQUESTS = (1, 4, 16)
DRAFTS = (0, 3, 5, 7)
CONTEXT = 128
ENGINES = ("vllm", "torch")

Measure = Callable[["StepShape"], float]


def step_times(
    target: Path, drafter: Path | None, config: Config, *, threads: int, repeats: int
) -> list[Figure]:
    """A row for each number of requests and of drafts, printed as they come: milliseconds of both
    engines. To be called in a process that has not imported torch.

    Args:
        drafter: whose projection is part of the steps.
        config: of the verifier; its engine is each of `ENGINES` in turn.
    """
    use_threads(threads)
    import torch

    from verifier_service.loading import load_engine

    assert torch.get_num_threads() == threads, "torch was here before its threads were set"

    measures = {}
    for name in ENGINES:
        verifier = replace(config.verifier, engine=name, num_threads=threads)
        engine = load_engine(target, model=config.model, verifier=verifier, drafter=drafter)
        measures[name] = engine.measure_step
    found = []
    for row in rows(measures, repeats):
        print(line(row), flush=True)
        found.append(row)
    return found


def rows(measures: dict[str, Measure], repeats: int) -> Iterator[Figure]:
    """The rows; the first repeat of each warms up and does not count."""
    from verifier_service.engine import StepShape

    for requests in REQUESTS:
        for drafts in DRAFTS:
            shape = StepShape(
                num_tokens=requests * (1 + drafts), row_tokens=1 + drafts, context=CONTEXT
            )
            times: dict[str, list[float]] = {name: [] for name in measures}
            for repeat in range(repeats + 1):
                for name in list(measures)[:: 1 if repeat % 2 else -1]:
                    step_s = measures[name](shape)
                    if repeat:
                        times[name].append(1e3 * step_s)
            yield {
                "requests": requests,
                "drafts": drafts,
                "load": round(os.getloadavg()[0], 1),
                **{name: _summary(values) for name, values in times.items()},
            }


def _summary(values: list[float]) -> Figure:
    """Milliseconds: median, quartiles, least."""
    low, median, high = statistics.quantiles(values, n=4)
    return {
        "median_ms": round(median, 2),
        "quartiles_ms": [round(low, 2), round(high, 2)],
        "least_ms": round(min(values), 2),
    }


def line(row: Figure) -> str:
    """A row as text."""
    sides = ", ".join(
        f"{name} {row[name]['median_ms']:.1f} ms (least {row[name]['least_ms']:.1f})"
        for name in ENGINES
    )
    return f"{row['requests']:3d} requests of {row['drafts']} drafts: {sides}"
