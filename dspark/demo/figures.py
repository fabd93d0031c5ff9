"""What the demo measures, as pure functions of what the client saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from dspark.bench.figures import draft_figures
from dspark.messages import Usage

NEAR_TIE: Final = 1e-3
"""Two tokens whose log probabilities lie this close may swap: wide and narrow matrix products
differ in their last bits."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One finished request, timed at the client."""

    name: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    usage: Usage
    first_s: float
    """Seconds from sending to the first text or token."""
    total_s: float
    """Seconds from sending to the end."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """Figures of one way of decoding; the fields are the JSON's."""

    tokens_per_s_user: float
    """Mean over requests of new tokens over time, waiting for the first one included."""
    tokens_per_s_total: float
    """New tokens of all requests over the time from the first sending to the last end."""
    accepted_length: float
    """Tokens per request and verify step: accepted drafts plus the target's own; plain is 1."""
    proposed: int
    verified: int
    accepted: int
    ttft_s: float
    """Mean time to first token."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place where two greedy answers to one prompt part."""

    name: str
    position: int
    near_tie: bool
    gap: float | None
    """Difference of the two tokens' log probabilities after the same prefix; None if an answer
    merely ends earlier."""


def summarise(answers: Sequence[Answer], wall_s: float) -> Side:
    """Figures of all answers of one run.

    Args:
        wall_s: seconds from the first request's sending to the last one's end.
    """
    usages = [answer.usage for answer in answers]
    drafts = draft_figures(usages)
    new = sum(usage.completion_tokens for usage in usages)
    return Side(
        tokens_per_s_user=_mean([a.usage.completion_tokens / a.total_s for a in answers]),
        tokens_per_s_total=new / wall_s,
        accepted_length=drafts["accepted_length"] or 1.0,
        proposed=drafts["proposed"],
        verified=drafts["verified"],
        accepted=drafts["accepted"],
        ttft_s=_mean([answer.first_s for answer in answers]),
    )


def differences(drafted: Sequence[Answer], plain: Sequence[Answer]) -> tuple[Difference, ...]:
    """Where greedy answers with and without drafts part, one entry per differing prompt."""
    found = []
    for ours, theirs in zip(drafted, plain, strict=True):
        if ours.token_ids == theirs.token_ids:
            continue
        pairs = zip(ours.token_ids, theirs.token_ids, strict=False)
        position = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
        if position is None:
            shorter = min(len(ours.token_ids), len(theirs.token_ids))
            found.append(Difference(name=ours.name, position=shorter, near_tie=False, gap=None))
            continue
        gap = abs(ours.logprobs[position] - theirs.logprobs[position])
        found.append(
            Difference(name=ours.name, position=position, near_tie=gap <= NEAR_TIE, gap=gap)
        )
    return tuple(found)


def verdict(found: Sequence[Difference], num_prompts: int) -> str:
    """The line about greedy identity, true whatever was found."""
    if not found:
        return f"greedy texts with and without drafts: identical, all {num_prompts}"
    places = "; ".join(_place(difference) for difference in found)
    same = num_prompts - len(found)
    faults = sum(not difference.near_tie for difference in found)
    kind = "only near-ties differ" if not faults else f"{faults} REAL DIFFERENCES"
    return f"greedy texts: {same} of {num_prompts} identical, {kind}: {places}"


def as_json(drafted: Side, plain: Side, found: Sequence[Difference]) -> dict[str, Any]:
    """The figures in the form that `--json` writes."""
    return {"drafted": asdict(drafted), "plain": asdict(plain), "greedy_identical": not found}


def _place(difference: Difference) -> str:
    if difference.gap is None:
        return f"{difference.name} ends at token {difference.position} on one side"
    return (
        f"{difference.name} at token {difference.position} "
        f"(log probabilities {difference.gap:.1e} apart)"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
