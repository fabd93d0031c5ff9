"""The target model: one ragged forward over the tokens of all rows, laid end to end.

Everything but attention works on [T, D], so a step costs what its real tokens cost, whatever the
mixture of rows. Query, key and value projections are one matrix product, gate and up another.

Shape legend: T tokens of the batch, M tokens whose logits are wanted, V vocabulary, D hidden size,
F feature width (tapped layers side by side), H query heads, J key/value heads, E head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from cluster.linear import PackedLinear
from verifier_service.torch_engine.attention import Group, attend
from verifier_service.torch_engine.kv import KVCache
from verifier_service.torch_engine.spec import TargetSpec


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Weights of one decoder layer."""

    qkv: PackedLinear
    out: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    attention_norm: Tensor
    mlp_norm: Tensor
    qk_norm: Tensor | None
    """[H + J, E], the scale of each query and key head; None without such a norm."""
    window: int | None


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """The tokens of one step on the device, in the order of their attention groups."""

    ids: Tensor
    """[T]"""
    positions: Tensor
    """[T]"""
    slots: Tensor
    """[T], where each token's keys and values go."""
    logit_rows: Tensor
    """[M], tokens whose logits are wanted."""
    groups: Sequence[Group]


@dataclass(frozen=True, kw_only=True)
class ForwardOutput:
    """What a forward leaves behind besides the KV it wrote."""

    logits: Tensor
    """[M, V]."""
    features: Tensor | None
    """[T, F], outputs of the tapped layers, None when nothing is tapped."""
    finite: Tensor
    """[T], whether each token's last hidden state is finite."""


class TargetModel:
    """A loaded target. Stateless between calls: keys and values live in the cache handed in."""

    def __init__(
        self,
        spec: TargetSpec,
        *,
        embedding_VD: Tensor,
        layers: Sequence[Layer],
        norm_D: Tensor,
        head: PackedLinear,
    ) -> None:
        self.spec = spec
        self.device = embedding_VD.device
        self.dtype = embedding_VD.dtype
        self._embedding = embedding_VD
        self._layers = layers
        self._norm = norm_D
        self._head = head
        self._frequencies = spec.inverse_frequencies.to(self.device)

    @torch.inference_mode()
    def forward(self, batch: TokenBatch, cache: KVCache, taps: Sequence[int] = ()) -> ForwardOutput:
        """Compute ``batch``, writing its keys and values to ``cache``.

        Args:
            taps: target layer ids. Layer id i is transformers' ``hidden_states[i + 1]``, the
                convention of drafter checkpoints: the residual stream behind layer i, except for
                the last layer, where transformers reports it after the final norm.
        """
        rope = self._rope(batch.positions)
        x_TD = functional.embedding(batch.ids, self._embedding)
        tapped: dict[int, Tensor] = {}
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            x_TD = x_TD + self._attention(index, layer, x_TD, rope, batch, cache)
            x_TD = x_TD + self._mlp(layer, x_TD)
            if index in taps:
                tapped[index] = x_TD if index < last else self._rms_norm(x_TD, self._norm)
        wanted_MD = self._rms_norm(x_TD.index_select(0, batch.logit_rows), self._norm)
        return ForwardOutput(
            logits=self._head(wanted_MD),
            features=torch.cat([tapped[i] for i in taps], dim=-1) if taps else None,
            finite=x_TD.isfinite().all(dim=-1),
        )

    @torch.inference_mode()
    def logits(self, hidden_MD: Tensor) -> Tensor:
        """The head's [M, V] of last hidden states, as the last layer's tap reports them."""
        out: Tensor = self._head(hidden_MD)
        return out

    def _attention(
        self,
        index: int,
        layer: Layer,
        x_TD: Tensor,
        rope: tuple[Tensor, Tensor],
        batch: TokenBatch,
        cache: KVCache,
    ) -> Tensor:
        spec = self.spec
        heads = spec.num_heads + spec.num_kv_heads
        qkv = layer.qkv(self._rms_norm(x_TD, layer.attention_norm))
        qkv_THE = qkv.view(-1, heads + spec.num_kv_heads, spec.head_dim)
        qk_THE = qkv_THE[:, :heads]
        if layer.qk_norm is not None:
            qk_THE = self._rms_norm(qk_THE, None) * layer.qk_norm
        qk_THE = rotate(qk_THE, rope)
        cache.write(index, batch.slots, qk_THE[:, spec.num_heads :], qkv_THE[:, heads:])
        q_THE = qk_THE[:, : spec.num_heads]
        mixed = attend(batch.groups, q_THE, cache, index, layer.window)
        out: Tensor = layer.out(mixed)
        return out

    def _mlp(self, layer: Layer, x_TD: Tensor) -> Tensor:
        gate_up = layer.gate_up(self._rms_norm(x_TD, layer.mlp_norm))
        gate, up = gate_up.chunk(2, dim=-1)
        out: Tensor = layer.down(functional.silu(gate).mul_(up))
        return out

    def _rms_norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], weight, self.spec.rms_norm_eps)

    def _rope(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [T, 1, E] (see `rotate`), computed in fp32."""
        angles = positions_T.float()[:, None] * self._frequencies
        cos, sin = angles.cos() * self.spec.rope_scale, angles.sin() * self.spec.rope_scale
        cos_TE, sin_TE = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        return cos_TE[:, None].to(self.dtype), sin_TE[:, None].to(self.dtype)


def rotate(x_THE: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions in the half-split layout of Llama and Qwen.

    Swapping the halves is a roll by half their length; the sign of the first half is in the sines.
    """
    cos, signed_sin = rope
    return torch.addcmul(x_THE * cos, x_THE.roll(x_THE.shape[-1] // 2, dims=-1), signed_sin)
