"""The seam between a drafter replica and what drafts: plain data in, plain data out.

The replica (`drafter_service.node`) owns streams, queues and batching; a drafter owns sessions and
computes. `DraftEngine` (DSpark) is the first; an n-gram or an EAGLE drafter fits behind the same
seam. A drafter never calls back and does no I/O.

Shape legend: S sessions that get a block, G gamma.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.wire import I32, Commit, Open, Release
from drafter_service.sampling import Block
from drafter_service.sessions import LostSession, SessionCounters


@dataclass(frozen=True, kw_only=True)
class DrafterLimits:
    """What a drafter expects of the frames that reach it."""

    gamma: int
    vocab_size: int
    """Ids on the wire are below this."""
    feature_size: int
    """Width of a projected row, 0 for a drafter that needs none."""


@dataclass(frozen=True, kw_only=True)
class HangUp:
    """A verifier's stream is over: its sessions cannot go on."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One thing to do, for the verifier stream with number ``owner``."""

    owner: int
    frame: Open | Commit | Release | HangUp


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """For which state of which request a block was drafted."""

    lane_id: str
    rid: int
    epoch: int
    anchor: int
    digest: int


@dataclass(frozen=True, kw_only=True)
class DraftOutcome:
    """What one batch gave: blocks, row by row for ``drafted``, and sessions lost on the way."""

    drafted: tuple[Drafted, ...]
    block: Block | None
    """None if nothing was drafted."""
    num_draft: I32
    """[S], at most G: drafters that look things up may find less."""
    lost: tuple[LostSession, ...]


class Drafter(Protocol):
    """Calls come one at a time, from one thread."""

    @property
    def limits(self) -> DrafterLimits:
        """Fixed at load."""
        ...

    @property
    def num_sessions(self) -> int:
        """Live sessions; may be read from any thread."""
        ...

    @property
    def counters(self) -> SessionCounters:
        """What happened to sessions so far; may be read from any thread."""
        ...

    def run(self, work: Sequence[Work], now_s: float) -> DraftOutcome:
        """Do everything in ``work``, in order, then draft for the sessions whose last commit asked.

        Frames have been checked against `limits`. What is wrong with one session (unknown, gap,
        digest, no room, an error while computing) is in ``lost`` and does not touch the others.
        An empty ``work`` only lets idle sessions expire.
        """
        ...
