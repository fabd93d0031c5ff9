"""All runs of a scenario, over as many processes as there are: cells do not know of each other.

The result is the same whatever the number of processes: cells are added up in their order.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from typing import Any, NamedTuple

from deploy.simulation.scenario import Run, Scenario
from deploy.simulation.tally import Tally
from deploy.simulation.traces import read_trace
from deploy.simulation.world import World

Progress = Callable[[float], None]
"""Told the share of the whole work that has been done since its last call."""


class _Part(NamedTuple):
    """One cell of one run."""

    run: int
    scenario: Scenario
    cell: int


def simulate(
    runs: Sequence[Run], *, num_processes: int = 1, progress: Progress = lambda share: None
) -> list[Tally]:
    """Play the runs; one tally each.

    Raises:
        ConfigError: a trace file that cannot be read.
    """
    for run in runs:
        read_trace(run.scenario.trace)  # before the work, not in the middle of it
    parts = [
        _Part(index, run.scenario, cell)
        for index, run in enumerate(runs)
        for cell in range(run.scenario.cells)
    ]
    tallies = [Tally() for _ in runs]
    for part, tally in zip(parts, _played(parts, num_processes, progress), strict=True):
        tallies[part.run].merge(tally)
    return tallies


def report_of(runs: Sequence[Run], tallies: Sequence[Tally]) -> dict[str, Any]:
    """Everything as the JSON file holds it: ``rows`` has one entry for each run, with its
    variant, its point of the sweep, its figures and its time line."""
    first = runs[0].scenario
    return {
        "title": first.title,
        "seed": first.seed,
        "duration_s": first.duration_s,
        "warmup_s": first.warmup_s,
        "cells": first.cells,
        "traffic": first.trace.kind,
        "rows": [
            {
                "variant": run.variant,
                "point": run.point,
                "figures": tally.figures(),
                "timeline": {name: line.tolist() for name, line in vars(tally.timeline).items()},
            }
            for run, tally in zip(runs, tallies, strict=True)
        ],
        "scenarios": [asdict(run.scenario) for run in runs],
    }


def _played(parts: Sequence[_Part], num_processes: int, progress: Progress) -> Iterator[Tally]:
    """Tallies of the parts, in their order."""
    if num_processes == 1:
        for part in parts:
            yield _play(part, lambda share: progress(share / len(parts)))
        return
    context = multiprocessing.get_context("spawn")  # no inherited threads or locks
    with ProcessPoolExecutor(min(num_processes, len(parts)), mp_context=context) as pool:
        futures = {pool.submit(_play, part): n for n, part in enumerate(parts)}
        done: dict[int, Tally] = {}
        due = 0
        try:
            for future in as_completed(futures):
                done[futures.pop(future)] = future.result()
                progress(1 / len(parts))
                while due in done:
                    yield done.pop(due)
                    due += 1
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()  # a cell may have hours to go
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _play(part: _Part, progress: Progress | None = None) -> Tally:
    return World(part.scenario, cell=part.cell).run(progress)
