"""Prompt lookup: a drafter without weights, which repeats what the text has said before.

Where the end of the committed text (its last few ids) occurred before, what followed then is
drafted. It needs no training, no checkpoint and no features, so it serves any target on the first
day; it pays on text that repeats itself: code, quotations, extraction, lists.

In rejection mode its law is one-hot (a block without q): the target keeps a draft x with
probability p(x), which is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.config import LookupConfig
from drafter_service.drafter import DrafterLimits, DraftOutcome, Work
from drafter_service.lookup_text import LookupText
from drafter_service.pending_rows import MAX_PENDING_BYTES, PendingRows
from drafter_service.sampling import Block
from drafter_service.sessions import DraftSession, Key, SessionCounters, SessionTable
from drafter_service.staging import Computed, Staged, is_live, run_batch


class PromptLookup:
    """A `drafter_service.drafter.Drafter` over the committed ids of each session.

    Args:
        settings: lengths of the n-grams and of the block.
        vocab_size: of the target.
        max_positions: longest text of one session.
        max_sessions, max_session_tokens, idle_session_s, busy_s: see `SessionTable`; a position
            here takes about 150 bytes.
        max_pending_bytes: of ids that wait for a draft to be asked for, see `PendingRows`.
    """

    def __init__(
        self,
        settings: LookupConfig,
        *,
        vocab_size: int,
        max_positions: int,
        max_sessions: int,
        max_session_tokens: int,
        idle_session_s: float,
        busy_s: float = 1.0,
        max_pending_bytes: int = MAX_PENDING_BYTES,
    ) -> None:
        self.settings = settings
        self._vocab_size = vocab_size
        self.sessions = SessionTable(
            max_sessions=max_sessions,
            max_tokens=max_session_tokens,
            max_positions=max_positions,
            idle_s=idle_session_s,
            busy_s=busy_s,
        )
        self.pending = PendingRows(max_pending_bytes)
        self._texts: dict[Key, tuple[DraftSession, LookupText]] = {}

    @property
    def limits(self) -> DrafterLimits:
        return DrafterLimits(gamma=self.settings.gamma, vocab_size=self._vocab_size, feature_size=0)

    @property
    def num_sessions(self) -> int:
        return len(self.sessions)

    @property
    def counters(self) -> SessionCounters:
        return self.sessions.counters

    def run(self, work: Sequence[Work], now_s: float) -> DraftOutcome:
        """See `drafter_service.drafter.Drafter.run`."""
        return run_batch(self.sessions, self.pending, work, now_s, self._compute)

    def _compute(self, staged: Sequence[Staged]) -> Computed:
        """Take in new ids, then look up for whoever asked."""
        self._texts = {
            key: (session, text)
            for key, (session, text) in self._texts.items()
            if is_live(self.sessions, session)
        }
        for one in staged:
            text = self._text(one.session)
            for rows in one.rows:
                text.extend(rows.ids)
        return self._draft([one.session for one in staged if one.want_draft])

    def _text(self, session: DraftSession) -> LookupText:
        """What is committed of a session; a new one has its first id only."""
        held = self._texts.get(session.key)
        if held is None:
            held = (session, LookupText(self.settings, session.first_id))
            self._texts[session.key] = held
        return held[1]

    def _draft(self, sessions: Sequence[DraftSession]) -> Computed:
        """One-hot blocks, padded with zeros behind what was found."""
        num, gamma = len(sessions), self.settings.gamma
        ids = np.zeros((num, gamma), np.int32)
        confidence = np.zeros((num, gamma), np.float32)
        num_draft = np.zeros(num, np.int32)
        for row, session in enumerate(sessions):
            drafts, expected = self._text(session).draft()
            num_draft[row] = len(drafts)
            ids[row, : len(drafts)] = drafts
            confidence[row, : len(drafts)] = expected
        block = Block(
            ids=ids,
            confidence=confidence,
            q_ids=np.zeros((0, gamma, 0), np.int32),
            q_probs=np.zeros((0, gamma, 0), np.float32),
            has_q=np.zeros(num, np.uint8),
        )
        return Computed(sessions=sessions, block=block if sessions else None, num_draft=num_draft)
