"""Who asks for what, when: open loops, closed loops and recorded traffic. Pure.

Open traffic (`TraceSpec.kind` of ``poisson``, ``burst``, ``file``) comes when it comes. In a closed
loop (``closed``, ``staggered``) each of N users sends the next request when the last one is
answered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from cluster.errors import ConfigError
from cluster.sections import natural, one_of, positive
from cluster.tiers import TIER_WEIGHTS
from deploy.simulation.curves import seconds
from deploy.simulation.keyed import uniforms
from deploy.simulation.recorded import Recorded, recorded_requests

CLOSED: Final = ("closed", "staggered")
_SERVICE: Final = 32
"""Purpose of keyed numbers, see `deploy.simulation.keyed`."""


class Arrival(NamedTuple):
    """One request of the traffic."""

    key: int
    """Names the request in the whole run, whichever cell serves it: its text hangs on it."""
    at_s: float
    num_prompt: int
    num_output: int
    """Tokens until its text ends by itself; never more than ``max_new_tokens``."""
    max_new_tokens: int
    target_rate: float = 0.0
    """Tokens per second that it should get, 0 for no target."""
    tier: str = ""
    """A name of `cluster.tiers`."""


@dataclass(frozen=True, kw_only=True)
class ServiceSpec:
    """A share of the requests that asks for a level of service."""

    share: float = field(default=1.0, metadata={"least": 0, "most": 1.0})
    tier: str = one_of("", *TIER_WEIGHTS)
    target_rate: float = seconds()
    """Tokens per second, 0 for no target."""


@dataclass(frozen=True, kw_only=True)
class LengthSpec:
    """A law of lengths in tokens."""

    kind: str = one_of("lognormal", "fixed", "uniform")
    mean: float = positive(256.0)
    spread: float = field(default=0.6, metadata={"least": 0, "most": 3.0})
    """``lognormal``: of the logarithm; ``uniform``: half the width, as a share of the mean."""
    least: int = positive(1)
    most: int = positive(32768)

    def draw(self, rng: np.random.Generator) -> int:
        """One length."""
        length = self.mean
        if self.kind == "lognormal":
            length = rng.lognormal(math.log(self.mean) - self.spread**2 / 2, self.spread)
        elif self.kind == "uniform":
            half = min(self.spread, 1.0) * self.mean
            length = rng.uniform(self.mean - half, self.mean + half)
        return int(min(max(round(length), self.least), self.most))


@dataclass(frozen=True, kw_only=True)
class TraceSpec:
    """The traffic of a whole run; its cells share it evenly."""

    kind: str = one_of("closed", "staggered", "poisson", "burst", "file")
    users: int = positive(32)
    """Closed loops: requests at a time."""
    think_s: float = seconds()
    """Closed loops: mean pause of a user after an answer (exponential)."""
    stagger_s: float = seconds(1.0)
    """``staggered``: the users start spread over this time, in even steps; ``closed``: at once."""
    rate: float = positive(4.0)
    """``poisson`` and ``burst``: mean requests per second."""
    burst_factor: float = field(default=3.0, metadata={"least": 1.0, "most": 1000.0})
    """``burst``: the rate swings, as a square wave, between ``2 f / (1 + f)`` and
    ``2 / (1 + f)`` times the mean ..."""
    period_s: float = positive(20.0)
    """... with this period."""
    path: str = ""
    """``file``: CSV with TIMESTAMP, ContextTokens and GeneratedTokens, or JSON lines with
    timestamp (ms), input_length and output_length; ``.gz`` is unpacked."""
    time_scale: float = positive(1.0)
    """``file``: 0.5 plays it twice as fast."""
    length_scale: float = positive(1.0)
    """``file``: on prompt and output lengths."""
    prompt: LengthSpec = field(default_factory=lambda: LengthSpec(mean=256))
    output: LengthSpec = field(default_factory=lambda: LengthSpec(mean=256))
    max_new_tokens: int = natural(0)
    """What each request asks for at most, wherever its text ends; 0: exactly its text."""
    services: tuple[ServiceSpec, ...] = ()
    """What requests ask for, by share; the rest asks for nothing."""

    def __post_init__(self) -> None:
        if sum(service.share for service in self.services) > 1 + 1e-9:
            raise ConfigError(
                "trace.services: shares of more than 1 together",
                hint="what is left asks for nothing",
            )
        if self.kind == "file" and not self.path:
            raise ConfigError("traffic of kind file without a path", hint="set trace.path")


class Trace:
    """The part of the traffic that one cell gets.

    Args:
        spec: of the whole run.
        cell: 0..num_cells - 1.

    Raises:
        ConfigError: see `read_trace`.
    """

    def __init__(
        self, spec: TraceSpec, *, cell: int = 0, num_cells: int = 1, seed: int = 0
    ) -> None:
        self._spec = spec
        self._cell = cell
        self._num_cells = num_cells
        self._rng = np.random.default_rng([seed, cell])
        self._recorded = read_trace(spec)
        self._num_made = 0

    def open_arrivals(self) -> Iterator[Arrival]:
        """What comes by itself, in the order of time; without end unless it is a file."""
        if self._spec.kind in CLOSED:
            yield from self._users()
        elif self._spec.kind == "file":
            recorded = self._recorded[self._cell :: self._num_cells]
            yield from (served(arrival, self._spec.services) for arrival in recorded)
        else:
            yield from self._drawn()

    def after(self, now: float) -> Arrival | None:
        """What a user sends after an answer at ``now``; None where the traffic is open."""
        if self._spec.kind not in CLOSED:
            return None
        think_s = self._rng.exponential(self._spec.think_s) if self._spec.think_s else 0.0
        return self._arrival(now + think_s)

    def _users(self) -> Iterator[Arrival]:
        users, stagger = self._spec.users, self._spec.kind == "staggered"
        for user in range(self._cell, users, self._num_cells):
            yield self._arrival(self._spec.stagger_s * user / users if stagger else 0.0)

    def _drawn(self) -> Iterator[Arrival]:
        spec, at_s = self._spec, 0.0
        rate, most = spec.rate / self._num_cells, 1.0
        if spec.kind == "burst":
            most = 2 * spec.burst_factor / (1 + spec.burst_factor)
        while True:  # thinned from the highest rate
            at_s += self._rng.exponential(1 / (rate * most))
            low = spec.kind == "burst" and at_s % spec.period_s >= spec.period_s / 2
            if not low or self._rng.random() < 1 / spec.burst_factor:
                yield self._arrival(at_s)

    def _arrival(self, at_s: float) -> Arrival:
        num_output = self._spec.output.draw(self._rng)
        most = self._spec.max_new_tokens
        key = self._num_made * self._num_cells + self._cell
        self._num_made += 1
        arrival = Arrival(
            key=key,
            at_s=at_s,
            num_prompt=self._spec.prompt.draw(self._rng),
            num_output=min(num_output, most) if most else num_output,
            max_new_tokens=most or num_output,
        )
        return served(arrival, self._spec.services)


def served(arrival: Arrival, services: Iterable[ServiceSpec]) -> Arrival:
    """The request with the level of service that its key draws."""
    if not services:
        return arrival
    place = float(uniforms(np.array([arrival.key], np.uint64), np.uint64(0), _SERVICE)[0])
    for service in services:
        place -= service.share
        if place < 0:
            return arrival._replace(target_rate=service.target_rate, tier=service.tier)
    return arrival


@lru_cache(maxsize=2)
def read_trace(spec: TraceSpec) -> tuple[Arrival, ...]:
    """The requests of `TraceSpec.path`, scaled, from time 0 on; empty for other kinds of traffic.

    Raises:
        ConfigError: unreadable, of no known format, or without a request.
    """
    if spec.kind != "file":
        return ()
    return tuple(_scaled(recorded_requests(Path(spec.path)), spec))


def _scaled(rows: Sequence[Recorded], spec: TraceSpec) -> Iterable[Arrival]:
    for key, (at_s, num_prompt, num_output) in enumerate(rows):
        length = max(round(num_output * spec.length_scale), 1)
        most = spec.max_new_tokens
        yield Arrival(
            key=key,
            at_s=(at_s - rows[0][0]) * spec.time_scale,
            num_prompt=max(round(num_prompt * spec.length_scale), 1),
            num_output=min(length, most) if most else length,
            max_new_tokens=most or length,
        )
