"""Tiny autoregressive drafters, random but reproducible, and the slow way to run them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cluster.drafter_spec import AutoregressiveSpec
from drafter_service.autoregressive.engine import AutoregressiveEngine
from drafter_service.autoregressive.model import AutoregressiveModel


def make_spec(**changes: Any) -> AutoregressiveSpec:
    """Four query heads on two key heads, gamma 4, vocabulary 60."""
    spec = AutoregressiveSpec(
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=512,
        gamma=4,
        target_layer_ids=(1, 3),
        num_target_layers=6,
        target_hidden_size=32,
        vocab_size=60,
        draft_vocab_size=60,
        has_confidence=True,
        norms_heads=False,
    )
    return dataclasses.replace(spec, **changes)


def make_model(spec: AutoregressiveSpec, seed: int = 0) -> AutoregressiveModel:
    """Random weights, large enough that every part matters; a reduced vocabulary in no order."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoregressiveModel(spec).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            else:
                torch.nn.init.normal_(parameter, 0, 0.3)
        if spec.draft_vocab_size != spec.vocab_size:
            model.d2t = torch.randperm(spec.vocab_size)[: spec.draft_vocab_size]
    return model


def make_engine(model: AutoregressiveModel, **changes: Any) -> AutoregressiveEngine:
    """An engine with room for everything a test does."""
    bounds = {"max_sessions": 64, "max_session_tokens": 1 << 14, "idle_session_s": 60.0}
    return AutoregressiveEngine(model, **{**bounds, "q_top_k": 8, **changes})


@torch.inference_mode()
def reference_rollout(
    model: AutoregressiveModel, ids: Sequence[int], rows_ND: Tensor, forced: Sequence[int] = ()
) -> tuple[Tensor, list[int], list[float]]:
    """(logits [G, V], greedy target ids, confidences) of one block, from scratch at every step: all
    rows again, one dense causal mask, keys repeated per query head.

    Args:
        ids: committed ids, one more than rows.
        rows_ND: projected features of all positions but the last.
        forced: ids to feed back instead of the drafted ones.
    """
    ids, features = list(ids), list(rows_ND)
    logits, drafted, confidences = [], [], []
    for step in range(model.spec.gamma):
        out = _last_output(model, ids[1:], torch.stack(features))
        hidden = _norm(out, model.norm.weight, model)
        logits.append(hidden @ model.lm_head.weight.T)
        if model.confidence_head is not None:
            proj = model.confidence_head.proj
            confidences.append(float((hidden @ proj.weight[0] + proj.bias[0]).sigmoid()))
        else:
            confidences.append(float(logits[-1].softmax(-1).max()))
        drafted.append(int(model.d2t[int(logits[-1].argmax())]))
        ids.append(forced[step] if forced else drafted[-1])
        features.append(hidden if model.spec.norm_output else out)
    return torch.stack(logits), drafted, confidences


def _last_output(model: AutoregressiveModel, ids: Sequence[int], features_ND: Tensor) -> Tensor:
    """Output [D] of the last row of a plain causal pass over all rows; the id of row i stands at
    position i + 1."""
    spec, layer = model.spec, model.layers[0]
    embedded = _norm(
        model.embed_tokens.weight[torch.tensor(ids)], layer.input_layernorm.weight, model
    )
    normed = _norm(features_ND, layer.hidden_norm.weight, model)
    pair = torch.cat([embedded, normed], dim=-1)
    attention = layer.self_attn
    q = _heads(pair @ attention.q_proj.weight.T, attention.q_norm, model)
    k = _heads(pair @ attention.k_proj.weight.T, attention.k_norm, model)
    v = (pair @ attention.v_proj.weight.T).view(len(pair), -1, spec.head_dim)
    out = []
    for head in range(spec.num_heads):
        key_head = head * spec.num_kv_heads // spec.num_heads
        scores = q[:, head] @ k[:, key_head].T / spec.head_dim**0.5
        mask = torch.ones_like(scores, dtype=torch.bool).tril()
        out.append(scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v[:, key_head])
    x = normed if spec.norm_before_residual else features_ND
    x = x + torch.cat(out, dim=-1) @ attention.o_proj.weight.T
    h = _norm(x, layer.post_attention_layernorm.weight, model)
    gate = torch.nn.functional.silu(h @ layer.mlp.gate_proj.weight.T)
    x = x + (gate * (h @ layer.mlp.up_proj.weight.T)) @ layer.mlp.down_proj.weight.T
    return x[-1]


def _norm(x: Tensor, weight: Tensor, model: AutoregressiveModel) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + model.spec.rms_norm_eps).rsqrt() * weight


def _heads(x: Tensor, norm: Any, model: AutoregressiveModel) -> Tensor:
    """Split into heads, norm where there is one, turn each pair by its position's angle."""
    spec = model.spec
    x = x.view(len(x), -1, spec.head_dim)
    if norm is not None:
        x = _norm(x, norm.weight, model)
    half = spec.head_dim // 2
    frequency = spec.rope_theta ** (-torch.arange(half) / half)
    angle = (1 + torch.arange(len(x)))[:, None, None] * frequency
    real, imaginary = x[..., :half], x[..., half:]
    return torch.cat(
        [
            real * angle.cos() - imaginary * angle.sin(),
            imaginary * angle.cos() + real * angle.sin(),
        ],
        dim=-1,
    )
