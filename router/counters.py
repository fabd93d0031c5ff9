"""What a lane and its router count; snapshots go to `RouterNode.metrics`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.wire import StepResult
from router.lane_request import Emission


@dataclass(kw_only=True)
class LaneCounters:
    """Totals since start, over all lanes of a router that share the object."""

    num_steps: int = 0
    num_real_tokens: int = 0
    """Tokens that the target computed, prompt chunks included."""
    num_padded_tokens: int = 0
    num_prefill_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that the verifiers' prefix caches spared, so that
    ``num_cached_tokens / (num_cached_tokens + num_prefill_tokens)`` is the hit rate."""
    num_preempted: int = 0
    """Requests that a verifier took the KV from, and computed again."""
    num_verify_rows: int = 0
    num_proposed: int = 0
    """Draft tokens in blocks that were matched to a verified row."""
    num_verified: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    """Tokens that verify rows gave, so ``num_emitted / num_verify_rows`` is the accepted length."""
    expected_accepted: float = 0.0
    """Sum of the survival of the verified tokens: what the recalibrated confidences promised."""
    num_explored_rows: int = 0
    """Rows verified whole, though the schedule wanted less, to learn what long drafts are worth."""
    num_explored: int = 0
    """Draft tokens verified for that alone."""
    num_explored_steps: int = 0
    """Steps of a neighbouring size, to learn how long that takes."""
    num_refused_steps: int = 0
    """Steps that went plain because the policy that is set would have been biased by drawn drafts.
    """
    step_s: float = 0.0
    predicted_step_s: float = 0.0
    num_queued_steps: int = 0
    """Steps handed over while another one ran."""
    num_late_drafts: int = 0
    """Rows that went plain because their block was not there in time."""
    num_draft_asks: int = 0
    """Rounds, and prompts, behind which a block was asked for."""
    num_drafts_gated: int = 0
    """Those behind which one could have been, and was not worth it."""
    num_draft_probes: int = 0
    """Of both: decided otherwise than expected to pay, to learn."""
    expected_gain: float = 0.0
    """Drafts that were expected to be accepted when their blocks were asked for."""
    num_rebinds: int = 0
    num_retries: int = 0
    """Requests admitted again after a row failed or the pools disagreed about the prefix."""
    stale: Counter[str] = field(default_factory=Counter)
    """Blocks not used, by reason."""
    num_malformed: int = 0
    """Blocks that broke a rule."""
    num_refused_frames: int = 0
    """Frames of drafters that cost them their stream."""

    def count_step(self, result: StepResult, predicted_step_s: float) -> None:
        """One step that ran."""
        self.num_steps += 1
        self.num_real_tokens += result.num_real_tokens
        self.num_padded_tokens += result.num_padded_tokens
        self.num_prefill_tokens += result.num_prefill_tokens
        self.num_cached_tokens += result.num_cached_tokens
        self.num_preempted += result.num_preempted
        if result.num_real_tokens:
            self.step_s += result.step_s
            self.predicted_step_s += predicted_step_s

    def count_rounds(self, rounds: Sequence[Emission]) -> None:
        """The verify rows of one step."""
        self.num_verify_rows += len(rounds)
        self.num_proposed += sum([o.num_proposed for o in rounds])
        self.num_verified += sum([o.num_verified for o in rounds])
        self.num_accepted += sum([o.num_accepted for o in rounds])
        self.num_emitted += sum([len(o.token_ids) for o in rounds])

    def snapshot(self) -> dict[str, float]:
        """Flat, for metrics: ``stale.epoch`` and the like for the counted reasons."""
        flat: dict[str, float] = {}
        for name, value in vars(self).items():
            if isinstance(value, Counter):
                flat |= {f"{name}.{reason}": float(n) for reason, n in sorted(value.items())}
                flat[name] = float(value.total())
            else:
                flat[name] = float(value)
        return flat
