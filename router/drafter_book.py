"""Which drafters are live, who drafts for whom, and how long their blocks take. Pure data.

One book serves all lanes of a router. The links (`router.drafters`) write who is up, the lanes
write bindings and latencies; nobody calls back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

_GAIN: Final = 0.125
_DEVIATION_GAIN: Final = 0.25
_LEAST_MARGIN_S: Final = 0.02
"""Only a block that never comes costs the whole wait; a late one costs the round its drafts."""
_MISSES_TO_GIVE_UP: Final = 3


@dataclass(frozen=True, kw_only=True)
class DrafterRef:
    """A drafter replica, as admissions and rebinds name it."""

    drafter_id: str
    address: str
    fingerprint: str
    """Of its checkpoint: it can draft for verifiers that hold the same projection."""


class DraftWait:
    """How long to wait for a block: mean latency plus four mean deviations, as TCP times a peer.

    It is 0, do not wait at all, while the drafter is known to be slower than ``bound_s`` or has
    answered nothing for a few rounds. Requests keep asking such a drafter, so the first block that
    comes, however late, sets it right again.
    """

    def __init__(self, bound_s: float) -> None:
        self._bound_s = bound_s
        self._mean_s: float | None = None
        self._deviation_s = 0.0
        self._num_missed = 0

    @property
    def mean_s(self) -> float:
        """Mean latency so far, the bound before there is any."""
        return self._bound_s if self._mean_s is None else self._mean_s

    @property
    def wait_s(self) -> float:
        """Seconds to wait from the step's result on."""
        if self._num_missed >= _MISSES_TO_GIVE_UP or self.mean_s > self._bound_s:
            return 0.0
        if self._mean_s is None:
            return self._bound_s
        margin_s = max(4 * self._deviation_s, self._mean_s, _LEAST_MARGIN_S)
        return min(self._mean_s + margin_s, self._bound_s)

    def observe(self, latency_s: float) -> None:
        """A block came, in time or late, so long after the result that asked for it."""
        self._num_missed = 0
        if self._mean_s is None:
            self._mean_s, self._deviation_s = latency_s, latency_s / 2
            return
        error_s = latency_s - self._mean_s
        self._mean_s += _GAIN * error_s
        self._deviation_s += _DEVIATION_GAIN * (abs(error_s) - self._deviation_s)

    def miss(self) -> None:
        """A block did not come in time."""
        self._num_missed += 1


@dataclass(kw_only=True)
class _Entry:
    ref: DrafterRef
    wait: DraftWait
    load: float = 0.0
    up: bool = True
    bound: set[int] = field(default_factory=set)


class DrafterBook:
    """Live drafters with their bound requests.

    Args:
        bound_s: most seconds that anyone waits for a block.
    """

    def __init__(self, bound_s: float) -> None:
        self._bound_s = bound_s
        self._entries: dict[str, _Entry] = {}

    def up(self, ref: DrafterRef) -> None:
        """A link to this drafter is open."""
        self._entries[ref.drafter_id] = _Entry(ref=ref, wait=DraftWait(self._bound_s))

    def down(self, drafter_id: str) -> None:
        """The link is gone; unknown ones are ignored."""
        self._entries.pop(drafter_id, None)

    def set_load(self, drafter_id: str, load: float, *, draining: bool) -> None:
        """What the directory says: sessions in hand, and whether it takes new ones."""
        if entry := self._entries.get(drafter_id):
            entry.load, entry.up = load, not draining

    def bind(self, rid: int, fingerprint: str, *, avoid: str = "") -> DrafterRef | None:
        """Give a request the least loaded drafter that fits, None if there is none.

        Args:
            avoid: a drafter that just failed this request: taken only if it is the last one.
        """
        fitting = [e for e in self._entries.values() if e.up and e.ref.fingerprint == fingerprint]
        if not fitting:
            return None
        best = min(
            fitting,
            key=lambda e: (e.ref.drafter_id == avoid, len(e.bound), e.load, e.ref.drafter_id),
        )
        best.bound.add(rid)
        return best.ref

    def unbind(self, rid: int, drafter_id: str) -> None:
        """The request ended or moves; unknown ones are ignored."""
        if entry := self._entries.get(drafter_id):
            entry.bound.discard(rid)

    def wait(self, drafter_id: str) -> DraftWait | None:
        """Latency record of a live drafter."""
        entry = self._entries.get(drafter_id)
        return entry.wait if entry else None

    def num_bound(self) -> dict[str, int]:
        """Bound requests per live drafter."""
        return {key: len(entry.bound) for key, entry in self._entries.items()}
