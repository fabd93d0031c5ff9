"""One causal layer that drafts token by token (EAGLE-3, arXiv 2503.01840; the paper's baseline).

Row i takes the id at position i + 1 beside the target's feature at position i, and predicts the id
at i + 2. Behind the last committed row the layer's own output stands in for the feature that the
target has not computed yet. Because there is one layer, the keys and values of a row depend on
that row alone: context is projected, never attended, until a block is drafted.

Attention is a function handed in, as in `drafter_service.backbone`.

Shape legend: N rows, D hidden size, H query heads, J key/value heads, E head dimension, F raw
feature width, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cluster.drafter_spec import AutoregressiveSpec
from drafter_service.backbone import DraftMLP, RMSNorm, rope_tables, rotate
from drafter_service.heads import ConfidenceHead

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [N, H, E], own k [N, J, E], own v [N, J, E]) -> mixed values [N, H, E]."""


class PairAttention(nn.Module):
    """Projections of [token; feature] pairs; keys are rotated here, mixing is the caller's."""

    def __init__(self, spec: AutoregressiveSpec) -> None:
        super().__init__()
        width, head = 2 * spec.hidden_size, spec.head_dim
        self.head_dim = head
        self.q_proj = nn.Linear(width, spec.num_heads * head, bias=False)
        self.k_proj = nn.Linear(width, spec.num_kv_heads * head, bias=False)
        self.v_proj = nn.Linear(width, spec.num_kv_heads * head, bias=False)
        self.o_proj = nn.Linear(spec.num_heads * head, spec.hidden_size, bias=False)
        self.q_norm = RMSNorm(head, spec.rms_norm_eps) if spec.norms_heads else None
        self.k_norm = RMSNorm(head, spec.rms_norm_eps) if spec.norms_heads else None

    def query(self, pair_N: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        return rotate(_heads(self.q_proj(pair_N), self.head_dim, self.q_norm), rope)

    def key_value(self, pair_N: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        k_NJE = rotate(_heads(self.k_proj(pair_N), self.head_dim, self.k_norm), rope)
        return k_NJE, _heads(self.v_proj(pair_N), self.head_dim, None)


class PairLayer(nn.Module):
    """The decoder layer; parameter names are those of EAGLE-3 checkpoints."""

    def __init__(self, spec: AutoregressiveSpec) -> None:
        super().__init__()
        width, eps = spec.hidden_size, spec.rms_norm_eps
        self.norm_before_residual = spec.norm_before_residual
        self.self_attn = PairAttention(spec)
        self.mlp = DraftMLP(width, spec.intermediate_size)
        self.input_layernorm = RMSNorm(width, eps)
        """Of the token's embedding."""
        self.hidden_norm = RMSNorm(width, eps)
        """Of the feature."""
        self.post_attention_layernorm = RMSNorm(width, eps)

    def pair(self, embedding_ND: Tensor, feature_ND: Tensor) -> tuple[Tensor, Tensor]:
        """(what attention projects [N, 2D], where the residual stream starts [N, D])."""
        normed_ND = self.hidden_norm(feature_ND)
        pair = torch.cat([self.input_layernorm(embedding_ND), normed_ND], dim=-1)
        return pair, normed_ND if self.norm_before_residual else feature_ND

    def forward(
        self,
        embedding_ND: Tensor,
        feature_ND: Tensor,
        rope: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> Tensor:
        pair, x_ND = self.pair(embedding_ND, feature_ND)
        k_NJE, v_NJE = self.self_attn.key_value(pair, rope)
        mixed_NHE = attend(self.self_attn.query(pair, rope), k_NJE, v_NJE)
        x_ND = x_ND + self.self_attn.o_proj(mixed_NHE.flatten(-2))
        out: Tensor = x_ND + self.mlp(self.post_attention_layernorm(x_ND))
        return out


class AutoregressiveModel(nn.Module):
    """Layer, norm and heads.

    ``embed_tokens`` (full vocabulary) is the target's, and so is ``lm_head`` (draft vocabulary)
    unless the checkpoint brings its own. ``d2t`` maps draft ids to target ids.
    """

    d2t: Tensor

    def __init__(self, spec: AutoregressiveSpec) -> None:
        super().__init__()
        self.spec = spec
        width = spec.hidden_size
        self.embed_tokens = nn.Embedding(spec.vocab_size, width)
        self.lm_head = nn.Linear(width, spec.draft_vocab_size, bias=False)
        self.fc = nn.Linear(spec.feature_width, width, bias=False)
        self.layers = nn.ModuleList([PairLayer(spec)])
        self.norm = RMSNorm(width, spec.rms_norm_eps)
        self.confidence_head = ConfidenceHead(width, 0) if spec.has_confidence else None
        self.register_buffer("d2t", torch.arange(spec.draft_vocab_size), persistent=False)

    def project(self, features_NF: Tensor) -> Tensor:
        """What a verifier ships, [N, D]: no norm here, the layer has its own."""
        out: Tensor = self.fc(features_NF)
        return out

    def key_values(
        self, ids_N: Tensor, features_ND: Tensor, positions_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keys (rotated) and values [N, J, E] of rows whose ids stand at these positions."""
        pair, _ = self._layer.pair(self.embed_tokens(ids_N), features_ND)
        return self._layer.self_attn.key_value(pair, self._rope(positions_N))

    def step(
        self, ids_N: Tensor, features_ND: Tensor, positions_N: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """One drafting step.

        Args:
            ids_N: the last token of each text, at ``positions_N``.
            features_ND: of the position before it, or the previous step's second output.
            attend: must let each row see itself.

        Returns:
            (normed output [N, D] for the heads, what stands in for the next feature [N, D]).
        """
        out_ND = self._layer(self.embed_tokens(ids_N), features_ND, self._rope(positions_N), attend)
        normed_ND = self.norm(out_ND)
        return normed_ND, normed_ND if self.spec.norm_output else out_ND

    @property
    def _layer(self) -> PairLayer:
        return self.layers[0]  # type: ignore[return-value]

    def _rope(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        return rope_tables(
            positions_N, self.spec.head_dim, self.spec.rope_theta, self.fc.weight.dtype
        )


def _heads(x: Tensor, head_dim: int, norm: RMSNorm | None) -> Tensor:
    """[N, heads * E] -> [N, heads, E], normed per head where there is a norm."""
    x = x.view(*x.shape[:-1], -1, head_dim)
    return x if norm is None else norm(x)
