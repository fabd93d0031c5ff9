"""Virtual time: a heap of events, the links that frames travel on, and devices that work."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any, Final

import numpy as np

_DONE_S: Final = 1e-12
"""Work left that counts as none."""


class Clock:
    """Runs what is due in the order of time; what is due at once, in the order it was planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()

    def at(self, when: float, act: Callable[..., None], *args: Any) -> None:
        """Have ``act(*args)`` called at that time, now if it is past."""
        heapq.heappush(self._events, (max(when, self.now), next(self._order), act, args))

    def run(self, until: float) -> None:
        """Play everything up to and including that time; it is then ``now``."""
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, act, args = heapq.heappop(events)
            act(*args)
        self.now = until


class Link:
    """One direction of a stream: frames take ``latency_s`` plus an exponential jitter, in order.

    Args:
        loss: share of frames that never arrive (of kinds that may get lost at all).
    """

    def __init__(
        self,
        clock: Clock,
        rng: np.random.Generator,
        *,
        latency_s: float,
        jitter_s: float,
        loss: float = 0.0,
    ) -> None:
        self.loss = loss
        self._clock = clock
        self._rng = rng
        self._latency_s = latency_s
        self._jitter_s = jitter_s
        self._last_s = 0.0

    def send(self, take: Callable[..., None], *args: Any) -> None:
        """Have ``take(*args)`` called when the frame is there."""
        if self.loss and self._rng.random() < self.loss:
            return
        at = self._clock.now + self._latency_s
        if self._jitter_s:
            at += self._rng.exponential(self._jitter_s)
        self._last_s = max(self._last_s, at)
        self._clock.at(self._last_s, take, *args)


class Device:
    """Work that shares a processor evenly: two jobs at a time take twice as long each.

    Args:
        name: its identity, by which routers see who shares it.
    """

    def __init__(self, clock: Clock, name: str) -> None:
        self.name = name
        self._clock = clock
        self._jobs: list[_Job] = []
        self._since = 0.0
        self._version = 0

    def run(self, work_s: float, done: Callable[..., None], *args: Any) -> None:
        """Call ``done(*args)`` when so many seconds of this device's whole time have been spent."""
        self._advance()
        self._jobs.append(_Job(work_s, done, args))
        self._plan()

    def cancel(self, done: Callable[..., None]) -> None:
        """Drop the jobs that would call this: whoever gave them is dead."""
        self._advance()
        self._jobs = [job for job in self._jobs if job.done != done]
        self._plan()

    def _advance(self) -> None:
        now = self._clock.now
        spent_s = now - self._since
        self._since = now
        for job in self._jobs:
            job.left_s -= spent_s / len(self._jobs)

    def _plan(self) -> None:
        self._version += 1
        if self._jobs:
            next_s = max(min(job.left_s for job in self._jobs), 0.0)
            at = self._clock.now + next_s * len(self._jobs)
            self._clock.at(at, self._finish, self._version)

    def _finish(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        first = min(self._jobs, key=lambda job: job.left_s)
        over = [job for job in self._jobs if job is first or job.left_s <= _DONE_S]
        self._jobs = [job for job in self._jobs if job not in over]
        self._plan()
        for job in over:
            job.done(*job.args)


class _Job:
    def __init__(self, work_s: float, done: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.left_s = work_s
        self.done = done
        self.args = args
