"""Tiny drafters and targets, random but reproducible, as models and as folders."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from cluster import digest
from cluster.drafter_spec import AutoregressiveSpec, DrafterSpec
from cluster.wire import Commit, Open
from drafter_service.backbone import DSparkModel
from drafter_service.drafter import Work
from drafter_service.engine import DraftEngine
from tests.frames import make_sampling

LANE = "router-0"


def make_spec(**changes: Any) -> DrafterSpec:
    """Two layers, four query heads on two key heads, gamma 4, vocabulary 60."""
    spec = DrafterSpec(
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=512,
        gamma=4,
        mask_token_id=59,
        target_layer_ids=(1, 3),
        num_target_layers=6,
        target_hidden_size=32,
        vocab_size=60,
        draft_vocab_size=60,
        head="vanilla",
        markov_rank=8,
        has_confidence=True,
        confidence_with_markov=True,
        sliding_windows=(None, None),
    )
    return dataclasses.replace(spec, **changes)


def make_model(spec: DrafterSpec, seed: int = 0) -> DSparkModel:
    """Random weights; a reduced vocabulary takes random target ids, in no order."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = DSparkModel(spec).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        if spec.draft_vocab_size != spec.vocab_size:
            model.d2t = torch.randperm(spec.vocab_size)[: spec.draft_vocab_size]
    return model


def make_engine(model: DSparkModel, **changes: Any) -> DraftEngine:
    """An engine with room for everything a test does."""
    bounds = {"max_sessions": 64, "max_session_tokens": 1 << 14, "idle_session_s": 60.0}
    return DraftEngine(model, **{**bounds, "q_top_k": 8, **changes})


def write_target(folder: Path, model: DSparkModel, *, tied: bool = False, **changes: Any) -> Path:
    """A target folder whose embeddings are the model's; its LM head holds the model's rows at
    ``d2t`` and random ones elsewhere."""
    spec = model.spec
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_target_layers,
        "tie_word_embeddings": tied,
    }
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    tensors = {"model.embed_tokens.weight": model.embed_tokens.weight.detach().clone()}
    if not tied:
        head = torch.randn(spec.vocab_size, spec.hidden_size)
        head[model.d2t] = model.lm_head.weight.detach()
        tensors["lm_head.weight"] = head
    save_file(tensors, folder / "model.safetensors")
    return folder


class Feed:
    """Writes the frames of one session, as a verifier would, with random rows and ids."""

    def __init__(
        self, rid: int, spec: DrafterSpec | AutoregressiveSpec, *, owner: int = 1, epoch: int = 0
    ) -> None:
        self.rid, self.owner, self.epoch, self.spec = rid, owner, epoch, spec
        self.random = np.random.default_rng(rid)
        self.ids: list[int] = [int(self.random.integers(spec.vocab_size))]
        self.rows = np.zeros((0, spec.hidden_size), np.float32)

    def open(self, **sampling: Any) -> Work:
        frame = Open(
            lane_id=LANE,
            rid=self.rid,
            epoch=self.epoch,
            first_id=self.ids[0],
            sampling=make_sampling(**sampling),
        )
        return Work(owner=self.owner, frame=frame)

    def commit(self, num: int, *, want_draft: bool = True, **changes: Any) -> Work:
        """The next ``num`` rows; ``changes`` replace fields of the frame."""
        first = len(self.ids) - 1
        ids = self.random.integers(self.spec.vocab_size, size=num)
        rows = self.random.standard_normal((num, self.spec.hidden_size)).astype(np.float32)
        self.ids += ids.tolist()
        self.rows = np.concatenate([self.rows, rows])
        frame = Commit(
            lane_id=LANE,
            rid=np.array([self.rid], np.int64),
            epoch=np.array([self.epoch], np.int32),
            first_position=np.array([first], np.int32),
            num_rows=np.array([num], np.int32),
            digest=np.array([digest.of(self.ids)], np.uint64),
            want_draft=np.array([want_draft], np.uint8),
            ids=ids.astype(np.int32),
            features=rows,
        )
        return Work(owner=self.owner, frame=dataclasses.replace(frame, **changes))


@torch.inference_mode()
def reference_hidden(
    model: DSparkModel, rows_ND: Tensor, anchor_id: int, *, visible: Sequence[int | None] = ()
) -> Tensor:
    """Backbone output of one block [G, D], written plainly from the paper: no cache, no batch, keys
    repeated per query head, one dense mask per layer.

    Args:
        rows_ND: projected rows of all context positions.
        visible: per layer, how many context positions before the anchor are seen; all by default.
    """
    spec = model.spec
    num, width = len(rows_ND), spec.block_width
    ids = torch.tensor([anchor_id] + [spec.mask_token_id] * (width - 1))
    x = model.embed_tokens.weight[ids]
    for index, layer in enumerate(model.layers):
        window = visible[index] if visible else None
        h = _norm(x, layer.input_layernorm, spec)
        q = _heads(h @ layer.self_attn.q_proj.weight.T, layer.self_attn.q_norm, spec, num)
        kv_input = torch.cat([rows_ND, h])
        k = _heads(kv_input @ layer.self_attn.k_proj.weight.T, layer.self_attn.k_norm, spec, 0)
        v = (kv_input @ layer.self_attn.v_proj.weight.T).view(num + width, -1, spec.head_dim)
        mask = torch.ones(width, num + width, dtype=torch.bool)
        if window is not None:
            mask[:, : max(num - window, 0)] = False
            if spec.causal_sliding_blocks:
                mask[:, num:] = torch.ones(width, width, dtype=torch.bool).tril()
        out = []
        for head in range(spec.num_heads):
            key_head = head * spec.num_kv_heads // spec.num_heads
            scores = q[:, head] @ k[:, key_head].T / spec.head_dim**0.5
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            out.append(weights @ v[:, key_head])
        x = x + torch.cat(out, dim=-1) @ layer.self_attn.o_proj.weight.T
        h = _norm(x, layer.post_attention_layernorm, spec)
        gate = torch.nn.functional.silu(h @ layer.mlp.gate_proj.weight.T)
        x = x + (gate * (h @ layer.mlp.up_proj.weight.T)) @ layer.mlp.down_proj.weight.T
    return _norm(x, model.norm, spec)[width - spec.gamma :]


def _norm(x: Tensor, module: Any, spec: DrafterSpec) -> Tensor:
    scale = (x.pow(2).mean(-1, keepdim=True) + spec.rms_norm_eps).rsqrt()
    normed: Tensor = x * scale * module.weight
    return normed


def _heads(x: Tensor, norm: Any, spec: DrafterSpec, first_position: int) -> Tensor:
    """Split into heads, norm, and turn each pair (i, i + E/2) by its position's angle."""
    x = _norm(x.view(len(x), -1, spec.head_dim), norm, spec)
    half = spec.head_dim // 2
    frequency = spec.rope_theta ** (-torch.arange(half) / half)
    angle = (first_position + torch.arange(len(x)))[:, None, None] * frequency
    real, imaginary = x[..., :half], x[..., half:]
    return torch.cat(
        [
            real * angle.cos() - imaginary * angle.sin(),
            imaginary * angle.cos() + real * angle.sin(),
        ],
        dim=-1,
    )


@torch.inference_mode()
def reference_block(
    model: DSparkModel, hidden_GD: Tensor, anchor_id: int
) -> tuple[list[int], list[float]]:
    """Greedy target ids and confidences of one block, from equations 4 to 7 written out."""
    spec, head = model.spec, model.markov_head
    ids, confidences = [], []
    previous, state = anchor_id, torch.zeros(spec.markov_rank)
    for h in hidden_GD:
        logits = model.lm_head.weight @ h
        e = torch.zeros(0)
        if head is not None:
            e = head.markov_w1.weight[previous]
            if spec.head == "vanilla":
                latent = e
            elif spec.head == "gated":
                gate = head.gate_proj.weight @ torch.cat([h, e]) + head.gate_proj.bias
                latent = gate.sigmoid() * e
            else:
                z = head.joint_proj.weight @ torch.cat([state, e, h]) + head.joint_proj.bias
                g, c, o = z.split(spec.markov_rank)
                state = g.sigmoid() * state + (1 - g.sigmoid()) * c.tanh()
                latent = o.tanh()
            logits = logits + head.markov_w2.weight @ latent
        if model.confidence_head is not None:
            feature = torch.cat([h, e]) if spec.confidence_with_markov else h
            proj = model.confidence_head.proj
            confidences.append(float((proj.weight @ feature + proj.bias).sigmoid()))
        else:
            confidences.append(float(logits.softmax(-1).max()))
        previous = int(model.d2t[int(logits.argmax())])
        ids.append(previous)
    return ids, confidences
