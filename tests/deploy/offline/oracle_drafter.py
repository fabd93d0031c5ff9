"""A drafter that knows the answers: every block is right up to a chosen place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cluster import digest
from cluster.wire import Commit, Open, Release
from drafter_service.drafter import Drafted, DrafterLimits, DraftOutcome, Work
from drafter_service.sampling import Block
from drafter_service.sessions import LostSession, SessionCounters


class OracleDrafter:
    """Drafts ``texts[rid]`` from the anchor on, wrong from place ``num_right(anchor)`` on.

    Args:
        texts: prompt and answer of each request.
        forget_at: commits that reach this position lose their session, as a full drafter would.
    """

    def __init__(
        self,
        texts: dict[int, Sequence[int]],
        *,
        vocab_size: int,
        gamma: int = 4,
        num_right: Callable[[int], int] = lambda anchor: 99,
        forget_at: int | None = None,
    ) -> None:
        self.limits = DrafterLimits(gamma=gamma, vocab_size=vocab_size, feature_size=0)
        self.counters = SessionCounters()
        self.batches: list[int] = []
        self._texts, self._num_right, self._forget_at = texts, num_right, forget_at
        self._sessions: dict[int, list[int]] = {}

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def run(self, work: Sequence[Work], now_s: float) -> DraftOutcome:
        drafted: list[Drafted] = []
        lost: list[LostSession] = []
        for item in work:
            if isinstance(item.frame, Open):
                self._sessions[item.frame.rid] = [item.frame.first_id]
            elif isinstance(item.frame, Release):
                for rid in item.frame.rid.tolist():
                    self._sessions.pop(rid, None)
            elif isinstance(item.frame, Commit):
                self._commit(item.frame, drafted, lost)
        if drafted:
            self.batches.append(len(drafted))
        gamma = self.limits.gamma
        rows = [self._draft(d) for d in drafted]
        block = Block(
            ids=np.array(rows, np.int32),
            confidence=np.tile(np.linspace(0.9, 0.3, gamma, dtype=np.float32), (len(rows), 1)),
            q_ids=np.zeros((0, gamma, 1), np.int32),
            q_probs=np.zeros((0, gamma, 1), np.float32),
            has_q=np.zeros(len(rows), np.uint8),
        )
        return DraftOutcome(
            drafted=tuple(drafted),
            block=block if rows else None,
            num_draft=np.full(len(rows), gamma, np.int32),
            lost=tuple(lost),
        )

    def _commit(self, frame: Commit, drafted: list[Drafted], lost: list[LostSession]) -> None:
        first = 0
        for s, rid in enumerate(frame.rid.tolist()):
            last = first + int(frame.num_rows[s])
            ids, first = frame.ids[first:last].tolist(), last
            session = self._sessions[rid]
            assert frame.first_position[s] == len(session) - 1
            session += ids
            assert digest.of(session) == int(frame.digest[s])
            if self._forget_at is not None and len(session) > self._forget_at:
                del self._sessions[rid]
                lost.append(
                    LostSession(lane_id=frame.lane_id, rid=rid, epoch=0, owner=1, reason="full")
                )
            elif frame.want_draft[s]:
                drafted.append(
                    Drafted(
                        lane_id=frame.lane_id,
                        rid=rid,
                        epoch=0,
                        anchor=len(session) - 1,
                        digest=int(frame.digest[s]),
                    )
                )

    def _draft(self, drafted: Drafted) -> list[int]:
        """The text after the anchor; wrong ids from the chosen place on, zeros past its end."""
        gamma, size = self.limits.gamma, self.limits.vocab_size
        text = list(self._texts[drafted.rid][drafted.anchor + 1 :][:gamma])
        text += [0] * (gamma - len(text))
        right = self._num_right(drafted.anchor)
        return [token if k < right else (token + 1) % size for k, token in enumerate(text)]
