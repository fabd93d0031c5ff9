"""What a lane of the rate model counts, from the end of its warm-up on. Pure."""

from __future__ import annotations

from collections import Counter

from deploy.simulation.rates_verifier import CountedResult


class LaneTally:
    """Sums over the steps of one lane."""

    def __init__(self) -> None:
        self.num_steps = 0
        """From the very beginning."""
        self.clear(0.0)

    def clear(self, now: float) -> None:
        """Count from now on."""
        self.began_s = self.ended_s = now
        self.steps = 0
        self.rows = 0
        self.tokens = 0.0
        """That rounds emitted."""
        self.drafts = 0
        self.step_s = 0.0
        self.chunk_steps = 0
        """Steps with prompt tokens ..."""
        self.chunk_s = 0.0
        """... and their time."""
        self.prefill = 0
        self.grants = 0
        self.granted_tokens = 0
        """Prompt tokens that steps had room for."""
        self.decoding_s = 0.0
        """Requests that decode, integrated over time."""
        self.groups = Counter[int]()
        self._num_decoding = 0

    def step(self, now: float, result: CountedResult, num_rows: int, num_decoding: int) -> None:
        """A step is back.

        Args:
            num_decoding: requests from now on.
        """
        self.num_steps += 1
        self.steps += 1
        self.rows += num_rows
        self.tokens += num_rows * result.step.tau
        self.drafts += result.step.num_drafts
        self.step_s += result.step_s
        self.prefill += result.num_prefill
        if result.num_prefill:
            self.chunk_steps += 1
            self.chunk_s += result.step_s
        self.decoding_s += (now - self.ended_s) * (self._num_decoding or num_decoding)
        self.ended_s, self._num_decoding = now, num_decoding

    def granted(self, num_tokens: int) -> None:
        """A step goes with room for so many prompt tokens."""
        self.grants += 1
        self.granted_tokens += num_tokens

    def regime(self, num_groups: int) -> None:
        """The gather rule has looked."""
        self.groups[num_groups] += 1
