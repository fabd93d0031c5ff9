"""How good a drafter is on sequences it never saw: expected and greedy accepted length.

Shape legend: B blocks, G gamma, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter_service.backbone import DSparkModel
from drafter_service.training.features import FeatureSequence
from drafter_service.training.loss import block_output, draft_law, l1_distance
from drafter_service.training.packing import anchor_range, draw_anchors, pack

_BLOCKS_AT_ONCE = 64


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
    model: DSparkModel,
    sequences: Sequence[FeatureSequence],
    greedy: Sequence[bool],
    *,
    anchors_per_sequence: int = 24,
) -> Evaluation:
    """Judge a drafter. The same sequences always give the same anchors.

    Args:
        greedy: whether each sequence's response is the target's greedy one.
    """
    generator = torch.Generator().manual_seed(0)
    judged = [
        _acceptance(model, sequence, draw_anchors(sequence, anchors_per_sequence, generator))
        for sequence in sequences
    ]
    acceptance_BG = torch.cat([acceptance for acceptance, _ in judged])
    error_BG = torch.cat([error for _, error in judged])
    rounds = [
        _greedy_rounds(model, sequence)
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


def greedy_matches(model: DSparkModel, sequence: FeatureSequence) -> list[int]:
    """Leading drafts equal to the text, for a block at every possible anchor in turn.

    On the target's greedy text this is exactly what verification accepts: as long as the drafts
    match, teacher forcing feeds the sequential head the drafts themselves.
    """
    matches: list[int] = []
    anchors = anchor_range(sequence)
    for first in range(0, len(anchors), _BLOCKS_AT_ONCE):
        anchors_A = torch.tensor(anchors[first : first + _BLOCKS_AT_ONCE])
        batch = pack([sequence], anchors_A[None], model.spec.gamma).to(model.d2t.device)
        drafted_BG = model.d2t[block_output(model, batch).logits.argmax(-1)]
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


def _greedy_rounds(model: DSparkModel, sequence: FeatureSequence) -> tuple[int, int]:
    return walk(greedy_matches(model, sequence), model.spec.gamma)


def _acceptance(
    model: DSparkModel, sequence: FeatureSequence, anchors_A: Tensor
) -> tuple[Tensor, Tensor]:
    """``1 - L1 / 2`` and the confidence head's distance from it, both [B, G], nan past the end."""
    batch = pack([sequence], anchors_A[None], model.spec.gamma).to(model.d2t.device)
    output = block_output(model, batch)
    law_BGV = draft_law(model, batch)
    valid_BG = batch.valid[0]
    acceptance_BG = 1 - l1_distance(output.logits.float().softmax(-1), law_BGV) / 2
    acceptance_BG = acceptance_BG.where(valid_BG, torch.nan)
    if output.confidence is None:
        return acceptance_BG, torch.full_like(acceptance_BG, torch.nan)
    return acceptance_BG, (output.confidence.float().sigmoid() - acceptance_BG).abs()
