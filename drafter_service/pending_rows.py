"""Rows that a drafter was sent and has not had to look at yet.

A request whose router asks for no draft (`router.gating`) still has its rows sent here, round by
round. Computing each at once would cost a pass per round for nothing; so they are kept as they
came, and the session catches up in one pass when a draft is asked for again. A session that is
never asked again costs a copy of its rows, and those are bounded: past ``max_bytes`` the rows that
have waited longest are computed after all.

Shape legend: N rows, D hidden size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from drafter_service.sessions import DraftSession, Key

MAX_PENDING_BYTES: Final = 32 << 20

_BYTES_PER_ID: Final = 32
_BYTES_PER_COMMIT: Final = 512
"""What the objects around the rows take, about."""


@dataclass(frozen=True, kw_only=True)
class NewRows:
    """Rows that one commit added to a session."""

    session: DraftSession
    first_position: int
    ids: tuple[int, ...]
    """[N] of positions ``first_position + 1 .. first_position + N``."""
    features: Tensor
    """[N, D] projected rows of positions ``first_position ..``; [0, 0] without features."""

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.first_position + len(self.ids)

    @property
    def num_bytes(self) -> int:
        """About what they take in memory."""
        return self.features.nbytes + _BYTES_PER_ID * len(self.ids) + _BYTES_PER_COMMIT

    def behind(self, position: int) -> NewRows:
        """Those from ``position`` on, with no memory shared with the frame they came in."""
        skip = max(position - self.first_position, 0)
        return replace(
            self,
            first_position=self.first_position + skip,
            ids=self.ids[skip:],
            features=self.features[skip:].clone(),
        )


@dataclass(slots=True, kw_only=True)
class _Held:
    session: DraftSession
    rows: list[NewRows] = field(default_factory=list)
    num_bytes: int = 0


class PendingRows:
    """What waits, by session; the session that has waited longest comes first.

    Args:
        max_bytes: most that may wait; 0 makes every row overdue at once.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held: dict[Key, _Held] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        """Sessions with rows that wait."""
        return len(self._held)

    def put(self, session: DraftSession, rows: Iterable[NewRows], *, first_needed: int) -> None:
        """Keep rows of a session, behind those that it has here already.

        Args:
            first_needed: what lies before it no layer will ever see: rows there are dropped.
        """
        held = self._held.setdefault(session.key, _Held(session=session))
        assert held.session is session, "forget sessions that are gone before new ones come"
        kept = [one.behind(first_needed) for one in rows if one.stop > first_needed]
        if held.rows and held.rows[0].first_position < first_needed:
            older = [one for one in held.rows if one.stop > first_needed]
            kept[:0] = [one.behind(first_needed) for one in older]
            self.num_bytes -= held.num_bytes
            held.rows, held.num_bytes = [], 0
        num_bytes = sum(one.num_bytes for one in kept)
        held.rows += kept
        held.num_bytes += num_bytes
        self.num_bytes += num_bytes
        if not held.rows:
            del self._held[session.key]

    def take(self, session: DraftSession) -> list[NewRows]:
        """What waits of a session, in order; from now on nothing does."""
        held = self._held.get(session.key)
        if held is None or held.session is not session:
            return []
        del self._held[session.key]
        self.num_bytes -= held.num_bytes
        return held.rows

    def take_overdue(self) -> list[tuple[DraftSession, list[NewRows]]]:
        """Whole sessions, the longest waiting first, until the rest is within the bound."""
        overdue = []
        while self.num_bytes > self.max_bytes:
            session = next(iter(self._held.values())).session
            overdue.append((session, self.take(session)))
        return overdue

    def forget(self, is_live: Callable[[DraftSession], bool]) -> None:
        """Drop what belongs to sessions that are gone."""
        for session in [held.session for held in self._held.values()]:
            if not is_live(session):
                self.take(session)


def join(new_rows: Sequence[NewRows]) -> list[NewRows]:
    """The same rows with all of a session's commits that lie behind each other in one piece."""
    return [
        _joined(list(commits))
        for _, commits in itertools.groupby(new_rows, key=lambda rows: id(rows.session))
    ]


def _joined(commits: list[NewRows]) -> NewRows:
    first = commits[0]
    if len(commits) == 1:
        return first
    assert all(a.stop == b.first_position for a, b in itertools.pairwise(commits)), "a hole"
    return replace(
        first,
        ids=tuple(itertools.chain.from_iterable(one.ids for one in commits)),
        features=torch.cat([one.features for one in commits]),
    )
