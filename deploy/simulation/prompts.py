"""Prompts that a simulated verifier has yet to compute, chunk by chunk, first come first served."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from deploy.simulation.table import NOBODY, RequestTable


class Chunks(NamedTuple):
    """What one step computes of prompts."""

    num_tokens: int
    done: list[int]
    """Slots of the requests whose prompt is through: they get their first token."""
    sum_context: int
    """Positions attended to."""
    num_pairs: int
    """Of a token and such a position."""


class PromptQueue:
    """Waiting prompts of the requests in a table; released ones drop out."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._rids: deque[int] = deque()

    @property
    def num_tokens(self) -> int:
        """Left to compute."""
        slots = [self._table.slot_of[rid] for rid in self._rids if rid in self._table.slot_of]
        return int(self._table.prefill_left[slots].sum())

    def add(self, rid: int) -> None:
        """An admitted request."""
        self._rids.append(rid)

    def take(self, budget: int) -> Chunks:
        """Spend a step's budget of tokens."""
        table, num_tokens, context, pairs, done = self._table, 0, 0, 0, []
        while self._rids and num_tokens < budget:
            slot = table.slot_of.get(self._rids[0], NOBODY)
            if slot == NOBODY:
                self._rids.popleft()
                continue
            left = int(table.prefill_left[slot])
            chunk = min(left, budget - num_tokens)
            num_tokens += chunk
            end = int(table.anchor[slot]) + 1 - (left - chunk)
            context += end
            pairs += chunk * end
            table.prefill_left[slot] -= chunk
            table.behind[slot] += chunk
            if chunk < left:
                break
            self._rids.popleft()
            table.behind[slot] -= 1  # of the token that comes now, see `RequestTable.rounds`
            done.append(slot)
        return Chunks(num_tokens=num_tokens, done=done, sum_context=context, num_pairs=pairs)
