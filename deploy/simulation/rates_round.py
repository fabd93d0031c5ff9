"""The steady round of a lane: what `dspark plan` and the pools of the rate model go by. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

from deploy.simulation.rates_tally import LaneTally


@dataclass(frozen=True, kw_only=True)
class Round:
    """Means over the rounds of a lane with so many requests."""

    num_requests: int
    """In the lane, their prompts included that are yet to be computed."""
    num_decoding: float
    num_groups: float
    """0: nobody drafts."""
    cycle_s: float
    """Between two rounds of a request."""
    step_s: float
    """Of a step, prompt chunks included."""
    step_interval_s: float
    """From step to step of the lane."""
    tau: float
    """Tokens of a round."""
    num_verified: float
    """Drafts verified per row."""
    prefill_tokens: float
    """Prompt tokens per step."""
    chunk_s: float
    """Of a step that carries a prompt chunk."""
    most_chunk: float
    """Prompt tokens that a step can carry."""
    verifier_busy: float
    """Share of the time."""
    drafter_busy: float

    @property
    def tokens_per_s(self) -> float:
        """Of the lane's rounds; prefills give the first tokens besides."""
        return self.num_decoding * self.tau / self.cycle_s

    @property
    def tokens_per_s_user(self) -> float:
        """Of one request, after its first token."""
        return self.tau / self.cycle_s

    @classmethod
    def of(
        cls,
        tallies: Sequence[LaneTally],
        *,
        num_requests: int,
        verifier_busy: float,
        drafter_busy: float,
        drafting: bool,
    ) -> Round:
        """Mean of lanes that are alike."""
        span_s = sum(tally.ended_s - tally.began_s for tally in tallies)
        steps = sum(tally.steps for tally in tallies)
        rows = sum(tally.rows for tally in tallies)
        decoding_s = sum(tally.decoding_s for tally in tallies)
        chunk_steps = sum(tally.chunk_steps for tally in tallies)
        step_s = sum(tally.step_s for tally in tallies) / steps
        groups = sum((tally.groups for tally in tallies), Counter[int]())
        return cls(
            num_requests=num_requests,
            num_decoding=decoding_s / span_s,
            num_groups=groups.most_common(1)[0][0] if drafting and groups else float(drafting),
            cycle_s=decoding_s / rows,
            step_s=step_s,
            step_interval_s=span_s / steps,
            tau=sum(tally.tokens for tally in tallies) / rows,
            num_verified=sum(tally.drafts for tally in tallies) / rows,
            prefill_tokens=sum(tally.prefill for tally in tallies) / steps,
            chunk_s=sum(t.chunk_s for t in tallies) / chunk_steps if chunk_steps else step_s,
            most_chunk=sum(t.granted_tokens for t in tallies) / sum(t.grants for t in tallies),
            verifier_busy=min(verifier_busy, 1.0),
            drafter_busy=min(drafter_busy, 1.0),
        )

    def mixed(self, other: Round, share: float) -> Round:
        """Between this one and ``other``, which has this share."""
        return Round(
            num_requests=self.num_requests,
            **{
                field.name: (1 - share) * getattr(self, field.name)
                + share * getattr(other, field.name)
                for field in fields(Round)
                if field.name != "num_requests"
            },
        )
