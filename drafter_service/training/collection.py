"""Filling a response log: the plan goes to a generator, answers come back and are kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from drafter_service.training.responses import Generator, Response, ResponseLog, ResponseTask
from drafter_service.training.shards import GeneratedFeatures

RESPONSES_AT_ONCE = 32
"""Answers written together: a feature shard, then their lines. A kill loses fewer than these."""


@dataclass(frozen=True, kw_only=True)
class CollectionProgress:
    """How far a collection is, what earlier runs did included."""

    num_done: int
    num_tasks: int
    num_tokens: int
    """Response tokens."""


def collect(
    tasks: Sequence[ResponseTask],
    generator: Generator,
    log: ResponseLog,
    *,
    features: GeneratedFeatures | None = None,
    report: Callable[[CollectionProgress], None] = lambda progress: None,
    budget_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Answer what the log lacks.

    Args:
        features: where to keep what the generator computed on the way.
        budget_s: after so many seconds no further task is begun; those begun are finished.

    Raises:
        StorageFull: no room; everything written before is kept.
        DSparkError: the generator failed.
    """
    missing = log.missing(tasks)
    num_before = len(tasks) - len(missing)
    pending: list[Response] = []
    num_done, num_tokens = num_before, log.num_tokens
    deadline_s = None if budget_s is None else clock() + budget_s
    for response in generator.generate(_until(deadline_s, missing, clock)):
        pending.append(response)
        num_done += 1
        num_tokens += len(response.ids)
        if len(pending) >= RESPONSES_AT_ONCE:
            _keep(pending, log, features)
            pending = []
        report(CollectionProgress(num_done=num_done, num_tasks=len(tasks), num_tokens=num_tokens))
    _keep(pending, log, features)


def _until(
    deadline_s: float | None, tasks: Sequence[ResponseTask], clock: Callable[[], float]
) -> Iterator[ResponseTask]:
    for task in tasks:
        if deadline_s is not None and clock() >= deadline_s:
            return
        yield task


def _keep(
    responses: Sequence[Response], log: ResponseLog, features: GeneratedFeatures | None
) -> None:
    """Features first: a line without its features costs a forward, the reverse costs nothing."""
    if not responses:
        return
    computed = [response.features for response in responses if response.features is not None]
    if features is not None and computed:
        features.add(computed)
    log.append(responses)
