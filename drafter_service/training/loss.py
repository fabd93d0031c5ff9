"""The training objective (paper section 3.3, equations 8 to 12), exact under a reduced vocabulary.

Shape legend: B blocks, G gamma, D hidden size, R Markov rank, V draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from drafter_service.backbone import DSparkModel
from drafter_service.training.config import LossWeights
from drafter_service.training.draft_model import DraftModel
from drafter_service.training.packing import Pack, block_hidden


@dataclass(frozen=True, kw_only=True)
class BlockOutput:
    """What the drafter says about a pack, teacher-forced."""

    logits: Tensor
    """[B, G, V]"""
    confidence: Tensor | None
    """[B, G]: logits, before the sigmoid."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Weighted means over the drafted positions that the text reaches."""

    total: Tensor
    cross_entropy: Tensor
    distillation: Tensor
    total_variation: Tensor
    confidence: Tensor


def block_output(model: DSparkModel, batch: Pack) -> BlockOutput:
    """Run backbone and heads over a pack, the text's own ids fed to the sequential head."""
    hidden_BGD = block_hidden(model, batch).flatten(0, 1)
    logits_BGV = model.lm_head(hidden_BGD)
    latent_BGR, embedding_BGR = _head_latents(model, hidden_BGD, batch.previous_ids.flatten(0, 1))
    if model.markov_head is not None:
        logits_BGV = logits_BGV + model.markov_head.markov_w2(latent_BGR)
    confidence_BG = None
    if model.confidence_head is not None:
        confidence_BG = model.confidence_head(hidden_BGD, embedding_BGR)
    return BlockOutput(logits=logits_BGV, confidence=confidence_BG)


def draft_law(model: DraftModel, batch: Pack) -> Tensor:
    """Target probabilities [B, G, V] of the draft ids, normalised over the *full* vocabulary."""
    logits = functional.linear(batch.hidden, model.lm_head.weight)
    return (logits - batch.log_normaliser[..., None]).exp().flatten(0, 1)


def l1_distance(draft_BGV: Tensor, law_BGV: Tensor) -> Tensor:
    """``||q - p||_1`` over the full vocabulary, [B, G].

    Ids outside the draft vocabulary have q = 0, so they add exactly the law's mass outside.
    """
    outside_BG = (1 - law_BGV.sum(-1)).clamp(min=0)
    return (draft_BGV - law_BGV).abs().sum(-1) + outside_BG


def total_weights(batch: Pack, t2d: Tensor, weights: LossWeights) -> Tensor:
    """What the means of `objective` divide by, [2]: over all positions, over those with a label."""
    return torch.stack([weight.sum() for weight in _position_weights(batch, t2d, weights)])


def objective(
    output: BlockOutput,
    law_BGV: Tensor,
    batch: Pack,
    t2d: Tensor,
    weights: LossWeights,
    totals: Tensor | None = None,
) -> Loss:
    """Equation 12 with position weights ``exp(-(k-1)/decay)``.

    Args:
        law_BGV: `draft_law` of the pack.
        t2d: draft id of each target id, -1 outside the draft vocabulary; such an id cannot be
            drafted and gives no cross-entropy.
        totals: `total_weights` of all packs of the step, of which this one is a share: the shares'
            losses then add up to the loss of the step as one pack. None: it is the whole step.
    """
    weight_BG, labelled_BG = _position_weights(batch, t2d, weights)
    if totals is None:
        totals = total_weights(batch, t2d, weights)
    total, labelled_total = totals.clamp(min=1e-9)
    log_draft_BGV = output.logits.float().log_softmax(-1)
    label_BG = t2d[batch.target_ids.flatten(0, 1)]
    nll_BG = -log_draft_BGV.gather(-1, label_BG.clamp(min=0)[..., None]).squeeze(-1)
    cross_entropy = (nll_BG * labelled_BG).sum() / labelled_total

    distillation = (-(law_BGV * log_draft_BGV).sum(-1) * weight_BG).sum() / total
    distance_BG = l1_distance(log_draft_BGV.exp(), law_BGV)
    total_variation = (distance_BG * weight_BG).sum() / total

    confidence = torch.zeros((), device=weight_BG.device)
    if output.confidence is not None:
        label = (1 - distance_BG.detach() / 2).clamp(0, 1)
        bce_BG = functional.binary_cross_entropy_with_logits(
            output.confidence.float(), label, reduction="none"
        )
        confidence = (bce_BG * weight_BG).sum() / total
    objective_total = (
        weights.cross_entropy * cross_entropy
        + weights.distillation * distillation
        + weights.total_variation * total_variation
        + weights.confidence * confidence
    )
    return Loss(
        total=objective_total,
        cross_entropy=cross_entropy,
        distillation=distillation,
        total_variation=total_variation,
        confidence=confidence,
    )


def _head_latents(
    model: DSparkModel, hidden_BGD: Tensor, previous_BG: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Latents and ``W1[x_{k-1}]``, both [B, G, R], stepped left to right."""
    head = model.markov_head
    if head is None:
        return hidden_BGD, None
    state = head.initial_state(len(hidden_BGD))
    latents, embeddings = [], []
    for step in range(hidden_BGD.shape[1]):
        latent, state, embedding = head.latent(previous_BG[:, step], hidden_BGD[:, step], state)
        latents.append(latent)
        embeddings.append(embedding)
    return torch.stack(latents, dim=1), torch.stack(embeddings, dim=1)


def _position_weights(batch: Pack, t2d: Tensor, weights: LossWeights) -> tuple[Tensor, Tensor]:
    """Weights [B, G] of all positions that the text reaches; of those with a draft id."""
    valid_BG = batch.valid.flatten(0, 1).float()
    steps_G = torch.arange(batch.gamma, device=valid_BG.device)
    weight_BG = valid_BG * torch.exp(-steps_G / weights.position_decay)
    return weight_BG, weight_BG * (t2d[batch.target_ids.flatten(0, 1)] >= 0)
