"""How good a drafter is on sequences it never saw: expected and greedy accepted length.

Shape legend: B blocks, G gamma, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafter_service.training.draft_model import DraftModel
from drafter_service.training.loss import BlockOutput, block_output, draft_law, l1_distance
from drafter_service.training.packing import Pack, anchor_range, draw_anchors, pack
from drafter_service.training.shards import FeatureSequence

_BLOCKS_AT_ONCE = 64

Forward = Callable[[Any, Pack], BlockOutput]
"""`Architecture.block_output` of the model's kind."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Figures on held-out sequences; accepted lengths count the bonus token."""

    expected_length: float
    """At temperature 1, drafts following the text: ``1 + sum_k prod_{i<=k} (1 - L1_i / 2)``."""
    acceptance: tuple[float, ...]
    """Mean of ``1 - L1_k / 2`` at each drafted position k = 1..gamma."""
    confidence_error: float | None
    """Mean distance between confidence and acceptance; None without a confidence head."""
    greedy_length: float | None
    """Tokens per round on the target's greedy replies; None when none is held out."""

    @property
    def score(self) -> float:
        """What the best checkpoint is chosen by: the mean of the lengths that are known."""
        if self.greedy_length is None:
            return self.expected_length
        return (self.expected_length + self.greedy_length) / 2


@torch.no_grad()
def evaluate(
    model: DraftModel,
    sequences: Sequence[FeatureSequence],
    greedy: Sequence[bool],
    *,
    anchors_per_sequence: int = 24,
    forward: Forward = block_output,
) -> Evaluation:
    """Judge a drafter. The same sequences always give the same anchors.

    Args:
        greedy: whether each sequence's response is the target's greedy one.
    """
    generator = torch.Generator().manual_seed(0)
    judged = [
        _acceptance(
            model, sequence, draw_anchors(sequence, anchors_per_sequence, generator), forward
        )
        for sequence in sequences
    ]
    acceptance_BG = torch.cat([acceptance for acceptance, _ in judged])
    error_BG = torch.cat([error for _, error in judged])
    rounds = [
        walk(greedy_matches(model, sequence, forward), model.spec.gamma)
        for sequence, is_greedy in zip(sequences, greedy, strict=True)
        if is_greedy
    ]
    num_rounds = sum(num for num, _ in rounds)
    return Evaluation(
        # Positions past the end of the text have no acceptance and end the product.
        expected_length=float(1 + acceptance_BG.nan_to_num(0.0).cumprod(-1).sum(-1).mean()),
        acceptance=tuple(acceptance_BG.nanmean(0).tolist()),
        confidence_error=None if model.confidence_head is None else float(error_BG.nanmean()),
        greedy_length=sum(tokens for _, tokens in rounds) / num_rounds if num_rounds else None,
    )


def greedy_matches(
    model: DraftModel, sequence: FeatureSequence, forward: Forward = block_output
) -> list[int]:
    """Leading drafts equal to the text, for a block at every possible anchor in turn.

    On the target's greedy text this is exactly what verification accepts: as long as the drafts
    match, teacher forcing feeds the sequential head the drafts themselves.
    """
    matches: list[int] = []
    anchors = anchor_range(sequence)
    for first in range(0, len(anchors), _BLOCKS_AT_ONCE):
        anchors_A = torch.tensor(anchors[first : first + _BLOCKS_AT_ONCE])
        batch = pack([sequence], anchors_A[None], model.spec.gamma).to(model.d2t.device)
        drafted_BG = model.d2t[forward(model, batch).logits.argmax(-1)]
        same_BG = (drafted_BG == batch.target_ids[0]) & batch.valid[0]
        matches += same_BG.cumprod(-1).sum(-1).tolist()
    return matches


def walk(matches: Sequence[int], gamma: int) -> tuple[int, int]:
    """Speculate along a text: (rounds, tokens emitted), stopping where a block would pass the end.

    Args:
        matches: `greedy_matches`, first anchor first.
    """
    place, rounds = 0, 0
    while place + gamma <= len(matches):
        place += matches[place] + 1
        rounds += 1
    return rounds, place


def _acceptance(
    model: DraftModel, sequence: FeatureSequence, anchors_A: Tensor, forward: Forward
) -> tuple[Tensor, Tensor]:
    """``1 - L1 / 2`` and the confidence head's distance from it, both [B, G], nan past the end."""
    batch = pack([sequence], anchors_A[None], model.spec.gamma).to(model.d2t.device)
    output = forward(model, batch)
    law_BGV = draft_law(model, batch)
    valid_BG = batch.valid[0]
    acceptance_BG = 1 - l1_distance(output.logits.float().softmax(-1), law_BGV) / 2
    acceptance_BG = acceptance_BG.where(valid_BG, torch.nan)
    if output.confidence is None:
        return acceptance_BG, torch.full_like(acceptance_BG, torch.nan)
    return acceptance_BG, (output.confidence.float().sigmoid() - acceptance_BG).abs()
