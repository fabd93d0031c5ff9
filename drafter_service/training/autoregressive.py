"""Training of the autoregressive drafter: the serving rollout, teacher-forced, for many anchors.

Every block is rolled out as it will be when served ("training-time test" in EAGLE-3): its first
step reads the target's feature before the anchor, each later one the layer's own output, and the
ids of the text. A step sees the context rows before its block and the steps of its own block.

Shape legend: S sequences, A anchors a sequence, B = S*A blocks, G gamma, L context rows, T steps so
far, D hidden size, V draft vocabulary, J key/value heads, R = H / J queries per key, E head
dimension.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cluster.drafter_spec import AutoregressiveSpec
from drafter_service.autoregressive.loading import load_autoregressive, save_autoregressive
from drafter_service.autoregressive.model import AutoregressiveModel
from drafter_service.training.config import DrafterShape
from drafter_service.training.initialisation import check_shape, drafter_spec, start_taps
from drafter_service.training.loss import BlockOutput
from drafter_service.training.packing import Pack
from drafter_service.training.target import Target

if TYPE_CHECKING:  # the architecture table imports this module
    from drafter_service.training.architecture import Start

_PAIR_NOISE = 0.2
"""Spread of the token's half of the projections, relative to an ordinary linear initialisation."""


class AutoregressiveArchitecture:
    """EAGLE-3 type; MTP-1 with ``gamma`` 1 and the target's last layer as the only tap."""

    def initial_model(self, target: Target, start: Start) -> AutoregressiveModel:
        """See `Architecture.initial_model`."""
        spec = autoregressive_spec(target, start.shape, start.mask_token_id)
        return initial_model(spec, target, start.d2t, start.seed)

    def load(self, checkpoint: Path, target: Target, shape: DrafterShape) -> AutoregressiveModel:
        """See `Architecture.load`."""
        model = load_autoregressive(checkpoint, target.path, device=target.device)
        check_shape(model.spec, autoregressive_spec(target, shape, mask_token_id=0), checkpoint)
        return model.train()

    def block_output(self, model: AutoregressiveModel, batch: Pack) -> BlockOutput:
        """See `Architecture.block_output`."""
        return block_output(model, batch)

    def save(self, model: AutoregressiveModel, folder: Path, dtype: torch.dtype) -> None:
        """See `Architecture.save`."""
        save_autoregressive(model, folder, dtype=dtype)


def autoregressive_spec(
    target: Target, shape: DrafterShape, mask_token_id: int
) -> AutoregressiveSpec:
    """The drafter of ``shape`` for ``target``: the target's widths, heads and rotary base.

    Raises:
        ConfigError: a tap does not exist in the target.
        CheckpointError: the target has a feature that draft layers lack.
    """
    common = drafter_spec(target, shape, mask_token_id)
    return AutoregressiveSpec(
        hidden_size=common.hidden_size,
        intermediate_size=common.intermediate_size,
        num_heads=common.num_heads,
        num_kv_heads=common.num_kv_heads,
        head_dim=common.head_dim,
        rms_norm_eps=common.rms_norm_eps,
        rope_theta=common.rope_theta,
        max_position_embeddings=common.max_position_embeddings,
        gamma=common.gamma,
        target_layer_ids=common.target_layer_ids,
        num_target_layers=common.num_target_layers,
        target_hidden_size=common.target_hidden_size,
        vocab_size=common.vocab_size,
        draft_vocab_size=common.draft_vocab_size,
        has_confidence=True,
        norms_heads="self_attn.q_norm.weight" in target.layer(-1),
    )


@torch.no_grad()
def initial_model(
    spec: AutoregressiveSpec, target: Target, d2t: Tensor, seed: int
) -> AutoregressiveModel:
    """A drafter on the target's device, its embedding and head frozen (shared with the target).

    The layer is the target's last one, reading features where that reads its input; the token's
    half of its projections starts as noise.
    """
    generator = torch.Generator().manual_seed(seed)
    model = AutoregressiveModel(spec)
    model.embed_tokens.weight.copy_(target.embedding)
    model.lm_head.weight.copy_(target.head[d2t])
    model.d2t = d2t.clone()
    model.norm.weight.copy_(target.final_norm)
    start_taps(model.fc, spec.target_layer_ids, spec.num_target_layers, generator)
    width = spec.hidden_size
    copied = {name: weight.cpu() for name, weight in target.layer(-1).items()}
    for name in "qkv":
        key = f"self_attn.{name}_proj.weight"
        noise = torch.empty_like(copied[key])
        noise.normal_(0, _PAIR_NOISE / width**0.5, generator=generator)
        copied[key] = torch.cat([noise, copied[key]], dim=1)
    copied["hidden_norm.weight"] = copied["input_layernorm.weight"]
    copied["input_layernorm.weight"] = target.layer(0)["input_layernorm.weight"].cpu()
    model.layers[0].load_state_dict(copied)
    if model.confidence_head is not None:
        model.confidence_head.proj.weight.zero_()
        model.confidence_head.proj.bias.zero_()
    model.embed_tokens.requires_grad_(False)
    model.lm_head.requires_grad_(False)
    return model.to(target.device)


def block_output(model: AutoregressiveModel, batch: Pack) -> BlockOutput:
    """Roll out every block of the pack, the text's own ids fed back."""
    context_SLD = model.project(batch.features)
    attend = _Rollout(model, batch, context_SLD)
    ids_BG = batch.previous_ids.flatten(0, 1)
    first_B = batch.anchors.flatten()
    index_SAD = (batch.anchors - 1)[..., None].expand(-1, -1, context_SLD.shape[-1])
    features_BD = context_SLD.gather(1, index_SAD).flatten(0, 1)
    hidden = []
    for step in range(batch.gamma):
        hidden_BD, features_BD = model.step(ids_BG[:, step], features_BD, first_B + step, attend)
        hidden.append(hidden_BD)
    hidden_BGD = torch.stack(hidden, dim=1)
    head = model.confidence_head
    return BlockOutput(
        logits=model.lm_head(hidden_BGD),
        confidence=None if head is None else head(hidden_BGD, None),
    )


class _Rollout:
    """The `drafter_service.autoregressive.model.Attend` of a pack; each call is one step."""

    def __init__(self, model: AutoregressiveModel, batch: Pack, context_SLD: Tensor) -> None:
        num_sequences, num_context = context_SLD.shape[:2]
        positions_L = torch.arange(num_context, device=context_SLD.device)
        k_NJE, v_NJE = model.key_values(
            batch.next_ids.flatten(),
            context_SLD.flatten(0, 1),
            (positions_L + 1).repeat(num_sequences),
        )
        per_sequence = (num_sequences, num_context, *k_NJE.shape[1:])
        self._k_SJLE = k_NJE.view(per_sequence).transpose(1, 2)
        self._v_SJLE = v_NJE.view(per_sequence).transpose(1, 2)
        # The row just before the anchor is the block's own first step.
        self._sees_SAL = positions_L < (batch.anchors - 1)[..., None]
        self._own: list[tuple[Tensor, Tensor]] = []

    def __call__(self, q_BHE: Tensor, k_BJE: Tensor, v_BJE: Tensor) -> Tensor:
        """Mixed values [B, H, E] of the next step. Written out: see `packing._mix`."""
        num_sequences, num_anchors, num_context = self._sees_SAL.shape
        keys = (num_sequences, num_anchors, *k_BJE.shape[1:])
        self._own.append((k_BJE.view(keys), v_BJE.view(keys)))
        k_SATJE, v_SATJE = (torch.stack(part, dim=2) for part in zip(*self._own, strict=True))
        q_SAJRE = q_BHE.view(*keys[:3], -1, keys[3]) * keys[3] ** -0.5
        context = torch.einsum("sajre,sjle->sajrl", q_SAJRE, self._k_SJLE)
        context = context.masked_fill(~self._sees_SAL[:, :, None, None], -torch.inf)
        own = torch.einsum("sajre,satje->sajrt", q_SAJRE, k_SATJE)
        weights = torch.cat([context, own], dim=-1).softmax(-1).to(v_BJE.dtype)
        mixed = torch.einsum("sajrl,sjle->sajre", weights[..., :num_context], self._v_SJLE)
        mixed = mixed + torch.einsum("sajrt,satje->sajre", weights[..., num_context:], v_SATJE)
        return mixed.flatten(2, 3).flatten(0, 1)
