"""The slow way: one anchor at a time, attention written out, probabilities over all ids.

Nothing here shares code with training beyond the model's weights and its linear maps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from drafter_service.backbone import DSparkModel
from drafter_service.training.shards import FeatureSequence


def random_model(spec_model: DSparkModel, seed: int) -> DSparkModel:
    """Fill a model with weights large enough that every part matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in spec_model.named_parameters():
            spread = 0.1 if name.endswith("norm.weight") else 0.3
            centre = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.copy_(centre + spread * torch.randn(parameter.shape, generator=generator))
    return spec_model


@torch.no_grad()
def block_hidden(model: DSparkModel, sequence: FeatureSequence, anchor: int) -> Tensor:
    """[G, D] of the block at one anchor, by loops over queries and heads."""
    spec = model.spec
    context = model.project(sequence.features[:anchor].float())
    key_values = model.context_key_values(context, torch.arange(anchor))
    group = spec.num_heads // spec.num_kv_heads

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = torch.cat([key_values[layer][0], k])
        values = torch.cat([key_values[layer][1], v])
        out = torch.zeros_like(q)
        for query in range(len(q)):
            for head in range(spec.num_heads):
                scores = keys[:, head // group] @ q[query, head] / math.sqrt(spec.head_dim)
                out[query, head] = scores.softmax(0) @ values[:, head // group]
        return out

    ids = [int(sequence.ids[anchor])] + [spec.mask_token_id] * (spec.gamma - 1)
    positions = torch.arange(anchor, anchor + spec.gamma)
    return model.forward_block(torch.tensor(ids), positions, attend)


@torch.no_grad()
def block_law(model: DSparkModel, hidden: Tensor, previous: Sequence[int]) -> Tensor:
    """[G, target vocabulary]: equation 4, zero outside the draft vocabulary."""
    law = torch.zeros(len(hidden), model.spec.vocab_size)
    head = model.markov_head
    state = head.initial_state(1) if head is not None else torch.zeros(0)
    for step, token in enumerate(previous):
        logits = model.lm_head(hidden[step])
        if head is not None:
            latent, state, _ = head.latent(torch.tensor([token]), hidden[step][None], state)
            logits = logits + head.markov_w2(latent)[0]
        law[step, model.d2t] = logits.softmax(-1)
    return law
