"""What a simulated run came to, in numbers that add up over cells, in any order of processes."""

# ruff: noqa: RUF009 - `_line` makes dataclass fields

from __future__ import annotations

import dataclasses
import math
from array import array
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deploy.simulation.keyed import F64

NUM_BINS: Final = 200
"""Of the time line."""
_PER_DECADE: Final = 100
_DECADES: Final = 8
_LEAST: Final = 1e-5
_COUNTED: Final = 4096
"""At a time."""


class Histogram:
    """Counts over logarithmic bins from 1e-5 to 1e3, each 2.3% wide."""

    def __init__(self) -> None:
        self._counts = np.zeros(_PER_DECADE * _DECADES, np.int64)
        self._uncounted: list[float] = []

    @property
    def counts(self) -> NDArray[np.int64]:
        """By bin."""
        self._count()
        return self._counts

    def add(self, values: list[float]) -> None:
        """Count these, sooner or later: many at a time take less."""
        self._uncounted += values
        if len(self._uncounted) >= _COUNTED:
            self._count()

    def merge(self, other: Histogram) -> None:
        """Add what another one has counted."""
        self._counts += other.counts

    def _count(self) -> None:
        if not self._uncounted:
            return
        places = np.log10(np.maximum(self._uncounted, _LEAST) / _LEAST) * _PER_DECADE
        last = len(self._counts) - 1
        self._counts += np.bincount(places.astype(np.int64).clip(0, last), minlength=last + 1)
        self._uncounted = []

    def percentile(self, percent: float) -> float:
        """Middle of the bin that it falls into; nan of nothing."""
        total = int(self.counts.sum())
        if not total:
            return math.nan
        place = int(np.searchsorted(self.counts.cumsum(), max(percent / 100 * total, 1)))
        return float(_LEAST * 10 ** ((place + 0.5) / _PER_DECADE))


def _line() -> Any:
    return field(default_factory=lambda: np.zeros(NUM_BINS))


@dataclass(kw_only=True)
class Timeline:
    """Sums over equal stretches of the run, warm-up included."""

    tokens: F64 = _line()
    """Emitted."""
    steps: F64 = _line()
    rows: F64 = _line()
    verified: F64 = _line()
    """Draft tokens."""
    step_s: F64 = _line()
    predicted_s: F64 = _line()


@dataclass(kw_only=True)
class Tally:
    """Totals of the time behind the warm-up."""

    window_s: float = 0.0
    """Length of that time."""
    num_arrived: int = 0
    num_finished: int = 0
    num_failed: int = 0
    """Ended with an error, or could never be served."""
    num_refused: int = 0
    """Turned away by the bounded queue."""
    num_returned: int = 0
    """Admitted again, with what they had, after a fault."""
    num_tokens: int = 0
    """Emitted, first tokens of answers included."""
    num_running_s: float = 0.0
    """Requests in lanes, integrated over time."""
    verifier_busy_s: float = 0.0
    verifier_s: float = 0.0
    """Time that verifiers were there."""
    drafter_busy_s: float = 0.0
    drafter_s: float = 0.0
    num_batches: int = 0
    num_blocks: int = 0
    """Drafted."""
    counters: dict[str, float] = field(default_factory=dict)
    """`router.counters.LaneCounters`, summed."""
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    rates: array[float] = field(default_factory=lambda: array("d"))
    """Tokens per second of each answer that ended in the window, behind its first token."""
    target_shares: array[float] = field(default_factory=lambda: array("d"))
    """The same over its target rate, of answers that had one."""
    gaps: Histogram = field(default_factory=Histogram)
    """Seconds between two emissions of one request."""
    errors: Histogram = field(default_factory=Histogram)
    """|predicted - actual| / actual of each step."""
    timeline: Timeline = field(default_factory=Timeline)

    def merge(self, other: Tally) -> None:
        """Add another cell. The window is the same one."""
        self.window_s = max(self.window_s, other.window_s)
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name, value in other.counters.items():
            self.counters[name] = self.counters.get(name, 0.0) + value
        self.ttft_s.extend(other.ttft_s)
        self.rates.extend(other.rates)
        self.target_shares.extend(other.target_shares)
        self.gaps.merge(other.gaps)
        self.errors.merge(other.errors)
        for column in dataclasses.fields(Timeline):
            line: NDArray[np.float64] = getattr(self.timeline, column.name)
            line += getattr(other.timeline, column.name)

    def figures(self) -> dict[str, Any]:
        """Flat, fit for JSON; null where there is nothing to average."""
        count = self.counters
        rows, steps = count.get("num_verify_rows", 0.0), count.get("num_steps", 0.0)
        return {
            "requests": {
                "arrived": self.num_arrived,
                "finished": self.num_finished,
                "failed": self.num_failed,
                "refused": self.num_refused,
                "returned": self.num_returned,
                "mean_running": _over(self.num_running_s, self.window_s),
            },
            "tokens_per_s": _over(self.num_tokens, self.window_s),
            "user_tokens_per_s": _percentiles(self.rates, low=True),
            "target": {
                "requests": len(self.target_shares),
                "attained": _over(sum(s >= 1 for s in self.target_shares), len(self.target_shares)),
                "share_of_it": _percentiles(self.target_shares, low=True),
            },
            "ttft_s": _percentiles(self.ttft_s),
            "itl_s": {f"p{p}": _number(self.gaps.percentile(p)) for p in (50, 95, 99)},
            "accepted_length": _over(count.get("num_emitted", 0.0), rows),
            "budget": _over(count.get("num_verified", 0.0) + rows, rows),
            "proposed": _over(count.get("num_proposed", 0.0), rows),
            "rows_per_step": _over(rows, steps),
            "tokens_per_step": _over(count.get("num_real_tokens", 0.0), steps),
            "step_s": _over(count.get("step_s", 0.0), steps),
            "predicted_step_s": _over(count.get("predicted_step_s", 0.0), steps),
            "step_error": {f"p{p}": _number(self.errors.percentile(p)) for p in (50, 95)},
            "verifier_busy": _over(self.verifier_busy_s, self.verifier_s),
            "drafter_busy": _over(self.drafter_busy_s, self.drafter_s),
            "verifiers": _over(self.verifier_s, self.window_s),
            "drafters": _over(self.drafter_s, self.window_s),
            "draft_batch": _over(self.num_blocks, self.num_batches),
            "counters": {name: count[name] for name in sorted(count)},
        }


_SUMS: Final = tuple(
    f.name
    for f in dataclasses.fields(Tally)
    if f.name.startswith("num_") or f.name.endswith(("busy_s", "verifier_s", "drafter_s"))
)


def _over(total: float, count: float) -> float | None:
    return total / count if count else None


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _percentiles(values: array[float], *, low: bool = False) -> dict[str, float | None]:
    """Mean and percentiles; ``low``: those of the worst off, who have little of it."""
    worst = (5, 1) if low else (95, 99)
    names = {f"p{p}": p for p in (50, *worst)}
    if not values:
        return dict.fromkeys(("mean", *names))
    data = np.frombuffer(values)
    found: dict[str, float | None] = {"mean": float(data.mean())}
    found |= {name: float(np.percentile(data, p)) for name, p in names.items()}
    return found
