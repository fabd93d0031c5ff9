"""The parallel backbone with context injection (paper sections 2.2 and 3.1, equations 2 and 3).

Attention is a function handed in: serving attends over the sessions' draft KV, training over
a packed index mask. Everything else (norms, projections, rotary positions, MLP) is one code.

Shape legend: N flattened positions, D hidden size, H query heads, J key/value heads, E head
dimension, F raw feature width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from cluster.drafter_spec import DrafterSpec
from drafter_service.heads import ConfidenceHead, SequentialHead

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [N, H, E], block k [N, J, E], block v [N, J, E]) -> mixed values [N, H, E]."""


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(
            x.dtype
        )


class DraftAttention(nn.Module):
    """Projections of one layer; keys are normed and rotated here, mixing is the caller's."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        width, head = spec.hidden_size, spec.head_dim
        self.head_dim = head
        self.q_proj = nn.Linear(width, spec.num_heads * head, bias=False)
        self.k_proj = nn.Linear(width, spec.num_kv_heads * head, bias=False)
        self.v_proj = nn.Linear(width, spec.num_kv_heads * head, bias=False)
        self.o_proj = nn.Linear(spec.num_heads * head, width, bias=False)
        self.q_norm = RMSNorm(head, spec.rms_norm_eps)
        self.k_norm = RMSNorm(head, spec.rms_norm_eps)

    def query(self, x_ND: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        q_NHE = self.q_norm(self.q_proj(x_ND).unflatten(-1, (-1, self.head_dim)))
        return rotate(q_NHE, rope)

    def key_value(self, x_ND: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        k_NJE = self.k_norm(self.k_proj(x_ND).unflatten(-1, (-1, self.head_dim)))
        v_NJE = self.v_proj(x_ND).unflatten(-1, (-1, self.head_dim))
        return rotate(k_NJE, rope), v_NJE


class DraftMLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x_ND: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x_ND)) * self.up_proj(x_ND))
        return out


class DraftLayer(nn.Module):
    """One pre-norm layer over block positions."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.self_attn = DraftAttention(spec)
        self.mlp = DraftMLP(spec.hidden_size, spec.intermediate_size)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(
        self, index: int, x_ND: Tensor, rope: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        normed_ND = self.input_layernorm(x_ND)
        q_NHE = self.self_attn.query(normed_ND, rope)
        k_NJE, v_NJE = self.self_attn.key_value(normed_ND, rope)
        mixed_NHE = attend(index, q_NHE, k_NJE, v_NJE)
        x_ND = x_ND + self.self_attn.o_proj(mixed_NHE.flatten(-2))
        out: Tensor = x_ND + self.mlp(self.post_attention_layernorm(x_ND))
        return out


class DSparkModel(nn.Module):
    """Backbone, sequential head and confidence head; names follow the DeepSpec checkpoint.

    ``embed_tokens`` (full vocabulary) and ``lm_head`` (draft vocabulary) are the target's, frozen.
    ``d2t`` maps draft ids to target ids; it is ``arange`` for a full vocabulary.
    """

    d2t: Tensor

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.spec = spec
        width = spec.hidden_size
        self.embed_tokens = nn.Embedding(spec.vocab_size, width)
        self.lm_head = nn.Linear(width, spec.draft_vocab_size, bias=False)
        self.fc = nn.Linear(spec.feature_width, width, bias=False)
        self.hidden_norm = RMSNorm(width, spec.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(spec) for _ in range(spec.num_layers))
        self.norm = RMSNorm(width, spec.rms_norm_eps)
        self.markov_head = SequentialHead(spec) if spec.markov_rank else None
        rank = spec.markov_rank if spec.confidence_with_markov else 0
        self.confidence_head = ConfidenceHead(width, rank) if spec.has_confidence else None
        self.register_buffer("d2t", torch.arange(spec.draft_vocab_size), persistent=False)

    def project(self, features_NF: Tensor) -> Tensor:
        """``H_ctx`` of equation 2: what a verifier ships, [N, D]."""
        out: Tensor = self.hidden_norm(self.fc(features_NF))
        return out

    def context_key_values(
        self, context_ND: Tensor, positions_N: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Per layer, the context half of equation 3: keys (rotated) and values [N, J, E]."""
        rope = self.rope(positions_N)
        return [layer.self_attn.key_value(context_ND, rope) for layer in self._layers()]

    def forward_block(self, ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """Normed hidden states [N, D] of ``[anchor, mask, ...]`` blocks laid end to end."""
        rope = self.rope(positions_N)
        x_ND = self.embed_tokens(ids_N)
        for index, layer in enumerate(self._layers()):
            x_ND = layer(index, x_ND, rope, attend)
        out: Tensor = self.norm(x_ND)
        return out

    def rope(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [N, 1, E] of rotary positions."""
        return rope_tables(
            positions_N, self.spec.head_dim, self.spec.rope_theta, self.fc.weight.dtype
        )

    def _layers(self) -> list[DraftLayer]:
        return list(self.layers)  # type: ignore[arg-type]


def rope_tables(
    positions_N: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Rotary cosines and sines [N, 1, E], computed in fp32."""
    exponents = (
        torch.arange(0, head_dim, 2, device=positions_N.device, dtype=torch.float32) / head_dim
    )
    angles = positions_N.float()[:, None] * theta**-exponents
    angles = torch.cat([angles, angles], dim=-1)[:, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_NHE: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary positions in the half-split layout of Llama and Qwen."""
    cos, sin = rope
    first, second = x_NHE.chunk(2, dim=-1)
    return x_NHE * cos + torch.cat([-second, first], dim=-1) * sin
