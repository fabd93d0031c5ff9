"""Many isolated anchor blocks of a few sequences as one forward pass (paper section 3.3).

A block at anchor P holds ``[id at P, mask, ...]`` at positions P..P+G-1. It sees the context at
positions before P and itself, in both directions; never another block, never another sequence.
Who sees what is arithmetic on index tensors: no loop over blocks.

Shape legend: S sequences, A anchors a sequence, G gamma, L context positions of the longest
sequence, N = S*A*G block positions end to end, D target hidden size, F feature width,
H query heads, J key/value heads, E head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional

from drafter_service.backbone import Attend, DSparkModel
from drafter_service.training.shards import FeatureSequence


@dataclass(frozen=True, kw_only=True)
class Pack:
    """One batch of blocks with what the target knows about them."""

    features: Tensor
    """[S, L, F]: raw features of positions 0..L-1, zero past a sequence's last needed position."""
    next_ids: Tensor
    """[S, L]: the ids behind those positions: of positions 1..L, 0 past the end."""
    anchors: Tensor
    """[S, A]: position of each anchor."""
    anchor_ids: Tensor
    """[S, A]"""
    target_ids: Tensor
    """[S, A, G]: the ids that followed the anchor in the target's text; 0 past the end."""
    valid: Tensor
    """bool [S, A, G]: the text reaches this far."""
    hidden: Tensor
    """[S, A, G, D]: target's last hidden state, whose law ``target_ids`` follow; fp32."""
    log_normaliser: Tensor
    """[S, A, G]: of that law, over the full vocabulary, fp32."""

    @property
    def gamma(self) -> int:
        return self.target_ids.shape[-1]

    @property
    def previous_ids(self) -> Tensor:
        """[S, A, G]: ``x_{k-1}`` of every drafted position, teacher-forced."""
        return torch.cat([self.anchor_ids[..., None], self.target_ids[..., :-1]], dim=-1)

    def to(self, device: torch.device) -> Pack:
        """The same pack on another device; the copy may still be under way."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Pack:
        """The same pack in pinned memory, from where a copy to a GPU does not block."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Pack:
        return Pack(**{field.name: change(getattr(self, field.name)) for field in fields(self)})


def anchor_range(sequence: FeatureSequence) -> range:
    """Positions that can be anchors: response ids with at least one id after them."""
    return range(sequence.num_prompt, len(sequence) - 1)


def draw_anchors(sequence: FeatureSequence, num: int, generator: torch.Generator) -> Tensor:
    """``num`` anchor positions [A], without repeats while the response is long enough."""
    choices = torch.tensor(anchor_range(sequence))
    if len(choices) >= num:
        return choices[torch.randperm(len(choices), generator=generator)[:num]]
    return choices[torch.randint(len(choices), (num,), generator=generator)]


def pack(sequences: Sequence[FeatureSequence], anchors_SA: Tensor, gamma: int) -> Pack:
    """Lay out the blocks of ``anchors_SA`` [S, A]; each row holds anchors of its sequence."""
    columns: dict[str, list[Tensor]] = {
        "features": [],
        "next_ids": [],
        "anchor_ids": [],
        "target_ids": [],
        "valid": [],
        "hidden": [],
        "log_normaliser": [],
    }
    longest = int(anchors_SA.max())
    for sequence, anchors_A in zip(sequences, anchors_SA, strict=True):
        law_AG = anchors_A[:, None] + torch.arange(gamma)
        valid_AG = law_AG + 1 < len(sequence)
        law_AG = law_AG.where(valid_AG, 0)
        context_LF = sequence.features[: int(anchors_A.max())].float()
        columns["features"].append(functional.pad(context_LF, (0, 0, 0, longest - len(context_LF))))
        next_L = sequence.ids[1 : len(context_LF) + 1]
        columns["next_ids"].append(functional.pad(next_L, (0, longest - len(next_L))))
        columns["anchor_ids"].append(sequence.ids[anchors_A])
        columns["target_ids"].append(sequence.ids[law_AG + 1].where(valid_AG, 0))
        columns["valid"].append(valid_AG)
        columns["hidden"].append(sequence.hidden[law_AG].float() * valid_AG[..., None])
        columns["log_normaliser"].append(sequence.log_normaliser[law_AG].where(valid_AG, 0.0))
    stacked = {name: torch.stack(column) for name, column in columns.items()}
    return Pack(anchors=anchors_SA, **stacked)


def visibility(anchors_SA: Tensor, gamma: int, num_context: int) -> Tensor:
    """bool [S, A*G, L + A*G]: which keys (context, then block positions) a query sees."""
    num_sequences, num_anchors = anchors_SA.shape
    owner_Q = torch.arange(num_anchors, device=anchors_SA.device).repeat_interleave(gamma)
    anchor_SQ = anchors_SA[:, owner_Q]
    context_L = torch.arange(num_context, device=anchors_SA.device)
    sees_context_SQL = context_L < anchor_SQ[..., None]
    sees_block_QQ = owner_Q[:, None] == owner_Q
    sees_block_SQQ = sees_block_QQ.expand(num_sequences, -1, -1)
    return torch.cat([sees_context_SQL, sees_block_SQQ], dim=-1)


def block_hidden(model: DSparkModel, batch: Pack) -> Tensor:
    """Backbone outputs [S, A, G, D] of every block of the pack."""
    ids_N, positions_N = _block_inputs(batch, model.spec.mask_token_id)
    hidden_ND = model.forward_block(ids_N, positions_N, _attend(model, batch))
    return hidden_ND.reshape(*batch.target_ids.shape, -1)


def _block_inputs(batch: Pack, mask_token_id: int) -> tuple[Tensor, Tensor]:
    ids_SAG = torch.full_like(batch.target_ids, mask_token_id)
    ids_SAG[..., 0] = batch.anchor_ids
    offsets_G = torch.arange(batch.gamma, device=ids_SAG.device)
    positions_SAG = batch.anchors[..., None] + offsets_G
    return ids_SAG.flatten(), positions_SAG.flatten()


def _attend(model: DSparkModel, batch: Pack) -> Attend:
    num_sequences, num_context = batch.features.shape[:2]
    positions_L = torch.arange(num_context, device=batch.features.device)
    context = model.context_key_values(
        model.project(batch.features.flatten(0, 1)), positions_L.repeat(num_sequences)
    )
    sees_SQK = visibility(batch.anchors, batch.gamma, num_context)

    def attend(layer: int, q_NHE: Tensor, k_NJE: Tensor, v_NJE: Tensor) -> Tensor:
        k_SJKE, v_SJKE = (
            torch.cat([_per_sequence(old, num_sequences), _per_sequence(new, num_sequences)], -2)
            for old, new in zip(context[layer], (k_NJE, v_NJE), strict=True)
        )
        return _mix(_per_sequence(q_NHE, num_sequences), k_SJKE, v_SJKE, sees_SQK)

    return attend


def _mix(q_SHQE: Tensor, k_SJKE: Tensor, v_SJKE: Tensor, sees_SQK: Tensor) -> Tensor:
    """Masked attention [S*Q, H, E]; the query heads of one key head share a product.

    Written out: on a CPU the backward of the fused kernel took a fifth of a training step.
    """
    num_sequences, num_heads, num_queries, head_dim = q_SHQE.shape
    num_keys = k_SJKE.shape[1]
    grouped = (num_sequences, num_keys, num_heads // num_keys, num_queries, -1)
    stacked = (num_sequences, num_keys, num_heads // num_keys * num_queries, -1)
    scores = (q_SHQE.reshape(stacked) @ k_SJKE.mT * head_dim**-0.5).reshape(grouped)
    scores = scores.masked_fill(~sees_SQK[:, None, None], -torch.inf)
    mixed = scores.softmax(-1).to(v_SJKE.dtype).reshape(stacked) @ v_SJKE
    mixed_SHQE: Tensor = mixed.reshape(q_SHQE.shape)
    return mixed_SHQE.transpose(1, 2).flatten(0, 1)


def _per_sequence(x_NHE: Tensor, num_sequences: int) -> Tensor:
    """[S*Q, H, E] -> [S, H, Q, E]."""
    return x_NHE.reshape(num_sequences, -1, *x_NHE.shape[1:]).transpose(1, 2)
