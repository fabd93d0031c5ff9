"""What a simulated verifier knows of its live requests, as columns, and rounds over many at once.

Shape legend: R rows, G gamma, N places (num_draft + 1 at most).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cluster import digest
from cluster.wire import FINISH_LENGTH, FINISH_NONE, FINISH_STOP, Admission
from deploy.simulation.keyed import F64, U64
from deploy.simulation.text import tokens

I64 = NDArray[np.int64]

NOBODY = 0
"""Slot of unknown request ids; its anchor matches none."""


class Rounds(NamedTuple):
    """What one step emits."""

    slot_R: I64
    num_accepted_R: I64
    num_emitted_R: I64
    token_RN: I64
    finish_R: I64


class RequestTable:
    """Live requests in slots.

    Args:
        capacity: most of them.
        gamma: of their drafter, 0 for none.
    """

    def __init__(self, capacity: int, gamma: int) -> None:
        self.slot_of: dict[int, int] = {}
        num_slots = capacity + 1
        self._free = list(range(capacity, NOBODY, -1))
        self.rid = np.zeros(num_slots, np.int64)
        self.key = np.zeros(num_slots, np.uint64)
        self.anchor = np.full(num_slots, 1 << 62)
        self.digest = np.zeros(num_slots, np.uint64)
        self.digest_before = np.zeros(num_slots, np.uint64)
        """Behind the last round, what its digest was: all that a row sent ahead of it knows."""
        self.end = np.zeros(num_slots, np.int64)
        """Anchor with which the text is complete ..."""
        self.limit = np.zeros(num_slots, np.int64)
        """... and the one that the length limit allows."""
        self.prefill_left = np.zeros(num_slots, np.int64)
        self.session = np.zeros(num_slots, np.int64)
        """Index of the verifier's draft sessions by peer, 0 for none."""
        self.epoch = np.zeros(num_slots, np.int64)
        self.behind = np.zeros(num_slots, np.int64)
        """Committed rows that the drafter has not taken in."""
        self.want_draft = np.zeros(num_slots, np.bool_)
        self.traits = np.zeros((num_slots, gamma))

    def add(self, admission: Admission, *, num_output: int, traits_G: F64) -> int:
        """Take a request; its slot. Its key is the seed of its sampling.

        Args:
            num_output: tokens of its whole text behind the prompt.
        """
        slot = self._free.pop()
        self.slot_of[admission.rid] = slot
        self.rid[slot] = admission.rid
        self.key[slot] = admission.sampling.seed
        self.anchor[slot] = len(admission.ids) - 1
        self.digest[slot] = self.digest_before[slot] = digest.of(admission.ids.tolist())
        last = admission.num_prompt - 1
        self.end[slot] = last + min(num_output, admission.max_new_tokens)
        self.limit[slot] = last + admission.max_new_tokens
        self.prefill_left[slot] = len(admission.ids)
        self.epoch[slot] = admission.session_epoch
        self.behind[slot] = 0
        self.session[slot] = 0
        self.want_draft[slot] = admission.want_draft
        self.traits[slot] = traits_G
        return slot

    def remove(self, rid: int) -> None:
        """Free a slot; unknown ids are ignored."""
        slot = self.slot_of.pop(rid, NOBODY)
        if slot != NOBODY:
            self.anchor[slot] = self.anchor[NOBODY]
            self._free.append(slot)

    def rounds(self, slot_R: I64, num_draft_R: I64, draft_ids_T: NDArray[np.int32]) -> Rounds:
        """Judge drafts against the texts, and commit: anchors and digests move on."""
        anchor_R = self.anchor[slot_R]
        places_N = np.arange(int(num_draft_R.max(initial=0)) + 1)
        position_RN = (anchor_R[:, None] + 1 + places_N).astype(np.uint64)
        token_RN = tokens(self.key[slot_R], position_RN)
        draft_RN = np.full(token_RN.shape, -1)
        draft_RN[places_N < num_draft_R[:, None]] = draft_ids_T
        num_right_R = (draft_RN == token_RN).cumprod(axis=1).sum(axis=1)
        num_emitted_R = np.minimum(num_right_R + 1, self.end[slot_R] - anchor_R)
        self.anchor[slot_R] = after_R = anchor_R + num_emitted_R
        self.digest_before[slot_R] = self.digest[slot_R]
        self.digest[slot_R] = digest.extend_rows(self.digest[slot_R], token_RN, num_emitted_R)
        self.behind[slot_R] += num_emitted_R
        over_R = np.where(after_R == self.limit[slot_R], FINISH_LENGTH, FINISH_STOP)
        return Rounds(
            slot_R=slot_R,
            num_accepted_R=np.minimum(num_right_R, num_emitted_R),
            num_emitted_R=num_emitted_R,
            token_RN=token_RN,
            finish_R=np.where(after_R == self.end[slot_R], over_R, FINISH_NONE),
        )


def emitted(rounds: Rounds) -> NDArray[np.int32]:
    """Their tokens one row behind another."""
    places_N = np.arange(rounds.token_RN.shape[1])
    there_RN = places_N < rounds.num_emitted_R[:, None]
    return rounds.token_RN[there_RN].astype(np.int32)


def keys_of(values: list[int]) -> U64:
    """Request keys as an array."""
    return np.array(values, np.uint64)
