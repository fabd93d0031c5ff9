"""One text that can be searched for its own repetitions, and how far such repetitions held.

The index is that of a dictionary coder: a table from each shortest n-gram to its latest place, and
for every place a link to the one before. Adding an id costs one table entry; a search walks a
bounded number of links, whatever the length of the text.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cluster.config import LookupConfig

_MAX_PLACES: Final = 64
"""Latest places of an n-gram that a search looks at."""
_PRIOR_ROUNDS: Final = 4.0
"""How many observed drafts the prior weighs as much as."""
_LEAST_MISSES: Final = 0.5
"""Keeps a confidence below 1 however well a text has repeated itself so far."""


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """What followed the longest earlier occurrence of the text's end."""

    ids: tuple[int, ...]
    """Up to gamma of them."""
    length: int
    """Of the n-gram that matched, at most ``max_ngram``."""


class LookupText:
    """The committed ids of one session.

    Args:
        first_id: at position 0.
    """

    def __init__(self, settings: LookupConfig, first_id: int) -> None:
        self._settings = settings
        self._ids = array("q", [first_id])
        self._latest: dict[int, int] = {}
        """Hash of a shortest n-gram -> the latest position behind one."""
        self._earlier = array("q")
        """[p]: the position before p behind the same n-gram, -1 for none."""
        self._track = _Track(settings)
        self._index_to(0)

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Append newly committed ids."""
        self._ids.extend(ids)
        self._track.observe(ids)
        self._index_to(len(self._ids) - 1)

    def draft(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Draft ids and their conditional confidences, none if the end never occurred before."""
        found = self.repetition()
        if found is None:
            return (), ()
        return found.ids, self._track.expect(found)

    def repetition(self) -> Repetition | None:
        """The longest match of the text's end, the latest of those; None if there is none.

        An occurrence may overlap the end: what it gives then repeats with that period.
        """
        shortest, longest = self._settings.min_ngram, self._settings.max_ngram
        end = len(self._ids)
        if end < shortest:
            return None
        place = self._latest.get(self._hash(end), -1)
        best_place, best_length = -1, shortest - 1
        for _ in range(_MAX_PLACES):
            if place < 0 or best_length == longest:
                break
            length = self._match(place, end)
            if length > best_length:
                best_place, best_length = place, length
            place = self._earlier[place]
        if best_place < 0:
            return None
        period = end - best_place
        ids = [self._ids[best_place + k % period] for k in range(self._settings.gamma)]
        return Repetition(ids=tuple(ids), length=best_length)

    def _index_to(self, stop: int) -> None:
        """Enter the n-grams that end before ``stop``: those that something follows already."""
        for position in range(len(self._earlier), stop + 1):
            if position < self._settings.min_ngram:
                self._earlier.append(-1)
                continue
            key = self._hash(position)
            self._earlier.append(self._latest.get(key, -1))
            self._latest[key] = position

    def _hash(self, end: int) -> int:
        return hash(self._ids[end - self._settings.min_ngram : end].tobytes())

    def _match(self, place: int, end: int) -> int:
        """How many ids before ``place`` equal those before ``end``, up to the longest n-gram."""
        most = min(self._settings.max_ngram, place)
        length = 0
        while length < most and self._ids[place - 1 - length] == self._ids[end - 1 - length]:
            length += 1
        return length


class _Track:
    """How often repetitions held in this text, by the length of what had matched by then.

    A draft that follows k right ones has k ids more behind it: position and length of the match
    come together in one number. Only drafts whose turn came count, and only from the ids that were
    committed, so what is expected of a draft depends on nothing but the text before it.
    """

    def __init__(self, settings: LookupConfig) -> None:
        self._least = settings.min_ngram
        most = settings.max_ngram + settings.gamma - 1
        lengths = range(self._least, most + 1)
        # Longer matches hold more often: half fail at one id, a third less with each more.
        self._held = [_PRIOR_ROUNDS * (1 - 0.5 * (2 / 3) ** (n - 1)) for n in lengths]
        self._tried = [_PRIOR_ROUNDS for _ in lengths]
        self._last: Repetition | None = None

    def expect(self, found: Repetition) -> tuple[float, ...]:
        """Probability that each id holds, given those before it; remembers what was proposed."""
        self._last = found
        first = found.length - self._least
        return tuple(
            self._held[n] / (self._tried[n] + _LEAST_MISSES)
            for n in range(first, first + len(found.ids))
        )

    def observe(self, ids: Sequence[int]) -> None:
        """What was committed after the last proposal."""
        last, self._last = self._last, None
        if last is None:
            return
        for k, (proposed, committed) in enumerate(zip(last.ids, ids, strict=False)):
            bucket = last.length - self._least + k
            self._tried[bucket] += 1
            if proposed != committed:
                return
            self._held[bucket] += 1
