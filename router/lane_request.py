"""One request inside a lane, as plain data, and what a round gives it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from cluster import digest
from cluster.errors import DSparkError
from cluster.sampling import REGIMES, regime_of
from cluster.wire import Sampling
from router.blocks import DraftBlock, Malformed
from router.drafter_book import DrafterRef
from router.progress import Progress


class Phase(enum.Enum):
    """Where a request stands. It leaves the lane when it is done."""

    __hash__ = object.__hash__
    """Phases are keys in every round of every request, and an enum's own hash is not built in."""

    QUEUED = "placed in the lane, not yet sent to the verifier"
    PREFILLING = "admitted; the verifier computes its prompt chunk by chunk"
    AWAITING = "committed up to its anchor; a block has been asked for"
    READY = "may go into the next step, with a block or without"
    IN_STEP = "a verify row of the step that is running"


DECODING: Final = (Phase.AWAITING, Phase.READY, Phase.IN_STEP)
"""Where a request goes round and round."""


@dataclass(kw_only=True, eq=False)
class LaneRequest:
    """A request as its lane sees it: committed ids, draft session, block in hand."""

    rid: int
    ids: list[int]
    """Prompt and everything emitted; the last one is the anchor."""
    num_prompt: int
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    sampling: Sampling
    draft: bool
    """False: always a plain row."""
    target_rate: float = 0.0
    """New tokens per second that it should get, 0 for no target."""
    tier: str = ""
    """A name of `cluster.tiers`; empty for the usual one."""
    constraint_kind: str = ""
    """As `Admission`'s, and so are the next two: the verifier's business alone."""
    constraint: str = ""
    adapter: str = ""
    progress: Progress = field(default_factory=Progress)
    """Tokens and time so far."""

    phase: Phase = Phase.QUEUED
    digest: int = field(init=False)
    """Of ``ids``."""
    regime: int = field(init=False)
    """By which its drafts are judged: an index into `cluster.sampling.REGIMES`."""
    since: float = 0.0
    """When the current phase began: the longest waiting rows go first."""
    on_enter: Callable[[LaneRequest, Phase, float], None] | None = None
    """Told of every change of phase before it happens: the roster that holds the request."""
    drafting: bool = False
    """Whether its last round asked for a block."""
    behind: bool = False
    """Whether the one before it had not: the drafter catches up before it drafts, so that block
    takes longer than those that follow."""

    asks_first: bool = True
    """Whether the block behind its prompt is asked for."""
    drafter: DrafterRef | None = None
    session_epoch: int = 0
    block: DraftBlock | None = None
    early: DraftBlock | Malformed | None = None
    """A block behind an anchor that the running step's result has yet to tell us of."""
    asks: dict[int, float] = field(default_factory=dict)
    """Anchor to the time at which its block was asked for, the latest few."""
    due: float = 0.0
    """AWAITING: until when the block may come."""
    rebind_at: float = 0.0
    """Without a drafter: not before this time is another one tried."""
    num_unbinds: int = 0
    """Draft sessions lost since the last good block."""
    failed_drafter: str = ""

    def __post_init__(self) -> None:
        self.digest = digest.of(self.ids)
        self.regime = REGIMES.index(regime_of(self.sampling))

    @property
    def anchor(self) -> int:
        """Position of the last committed token."""
        return len(self.ids) - 1

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.num_prompt + self.max_new_tokens - len(self.ids)

    @property
    def max_len(self) -> int:
        """Most positions that it can come to."""
        return self.num_prompt + self.max_new_tokens

    @property
    def max_draft(self) -> int:
        """Draft tokens worth verifying: the bonus token takes the last place."""
        return max(self.num_prompt + self.max_new_tokens - len(self.ids) - 1, 0)

    @property
    def wants_draft(self) -> bool:
        """Whether a block asked for in the coming step can be of use after it."""
        return self.draft and self.num_prompt + self.max_new_tokens - len(self.ids) >= 3

    def enter(self, phase: Phase, now: float) -> None:
        """Change the phase."""
        if self.on_enter is not None:
            self.on_enter(self, phase, now)
        self.phase = phase
        self.since = now

    def commit(self, token_ids: tuple[int, ...], prefix_digest: int, now: float) -> None:
        """Append emitted tokens; the block, drafted behind the old anchor, dies.

        Args:
            prefix_digest: of everything up to and including them.
        """
        self.progress.note(len(token_ids), now)
        self.ids.extend(token_ids)
        self.digest = prefix_digest
        self.block = None


class Emission(NamedTuple):
    """What one round emitted for one request."""

    rid: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: int
    """``FINISH_*`` of `cluster.wire`."""
    is_round: bool
    """False for the token that ends a prefill."""
    num_proposed: int = 0
    num_verified: int = 0
    num_accepted: int = 0

    @property
    def num_reached(self) -> int:
        """Drafts whose fate is known: the accepted ones and the refused one.

        A stop id or the length limit that cuts the round leaves accepted drafts only: what lay
        behind the cut was never decided.
        """
        return min(len(self.token_ids), self.num_verified)


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The verifier cannot serve this request: it ends with the error."""

    rid: int
    error: DSparkError


@dataclass(frozen=True, kw_only=True)
class Retry:
    """The verifier's state of this request is of no use: admit it again with all it has emitted."""

    rid: int
    reason: str


Outcome = Emission | Failed | Retry
