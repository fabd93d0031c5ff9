"""Which drafters are live, who drafts for whom, and how long their blocks take. Pure data.

One book serves all lanes of a router. The links (`router.drafters`) write who is up, the lanes
write bindings and latencies; nobody calls back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from router.link_profile import LinkProfile


@dataclass(frozen=True, kw_only=True)
class DrafterRef:
    """A drafter replica, as admissions and rebinds name it."""

    drafter_id: str
    address: str
    fingerprint: str
    """Of its checkpoint: it can draft for verifiers that hold the same projection."""
    device: str = ""
    """Identity of what it computes on; empty: it does not say."""


@dataclass(kw_only=True)
class _Entry:
    ref: DrafterRef
    link: LinkProfile
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
        self._entries[ref.drafter_id] = _Entry(ref=ref, link=LinkProfile(self._bound_s))

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

    def link(self, drafter_id: str) -> LinkProfile | None:
        """Draft time and round trip of a live drafter."""
        entry = self._entries.get(drafter_id)
        return entry.link if entry else None

    def links(self) -> dict[str, LinkProfile]:
        """The same of all live drafters."""
        return {key: entry.link for key, entry in self._entries.items()}

    def num_bound(self) -> dict[str, int]:
        """Bound requests per live drafter."""
        return {key: len(entry.bound) for key, entry in self._entries.items()}
