"""Our side of the comparison: what the production path computes for a block, caught on its way.

Features go through the verifier's projection, rows through the commit frames of a session, blocks
through the engine's ``run``. Hooks on the LM head, the sequential head's last layer and the
confidence head see the numbers that the engine drafts from.

Shape legend: N blocks, G draft tokens of a block, W draft vocabulary, T positions, F raw feature
width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from cluster.drafter_checkpoint import checkpoint_kind
from drafter_service.autoregressive.engine import AutoregressiveEngine
from drafter_service.autoregressive.loading import load_autoregressive
from drafter_service.engine import DraftEngine
from drafter_service.loading import load_drafter
from tests.drafters import Feed, make_engine
from verifier_service.projection import load_feature_projection


@dataclass(frozen=True, kw_only=True)
class OurBlocks:
    """Greedy blocks and the numbers behind them; row i belongs to anchor i."""

    logits: Tensor
    """[N, G, W]."""
    confidence_logits: Tensor | None
    """[N, G]."""
    confidence: Tensor
    """[N, G], as a router gets them."""
    draft_ids: Tensor
    """[N, G], target ids."""
    texts: list[list[int]]
    """Committed ids of each session; the last is the anchor's."""
    d2t: Tensor
    """[W]."""


def blocks(
    checkpoint: Path, target: Path, features_TF: Tensor, anchors: Sequence[int]
) -> OurBlocks:
    """Draft one block behind each anchor, in one batch: the rows before it are its context."""
    device = torch.device("cpu")
    project = load_feature_projection(checkpoint, target, device=device, dtype=torch.float32)
    rows_TD = project(features_TF).numpy()
    engine = _open(checkpoint, target)
    model, base, biases, confidences = engine.model, _Calls(), _Calls(), _Calls()
    d2t_W = model.d2t.clone()
    model.lm_head.register_forward_hook(base)
    if isinstance(engine, DraftEngine) and engine.model.markov_head is not None:
        engine.model.markov_head.markov_w2.register_forward_hook(biases)
    if model.confidence_head is not None:
        model.confidence_head.register_forward_hook(confidences)
    work, texts = [], []
    for rid, anchor in enumerate(anchors):
        feed = Feed(rid, model.spec)  # type: ignore[arg-type]
        work += [feed.open(), feed.commit(anchor, features=rows_TD[:anchor])]
        texts.append(feed.ids)
    outcome = engine.run(work, 0.0)
    assert [drafted.anchor for drafted in outcome.drafted] == list(anchors)
    assert outcome.block is not None
    # DSpark's LM head sees a block at once, that of an autoregressive drafter one slot at a time.
    logits_NGW = base.outputs[0] if isinstance(engine, DraftEngine) else base.stacked()
    if biases.outputs:
        logits_NGW = logits_NGW + biases.stacked()
    return OurBlocks(
        logits=logits_NGW,
        confidence_logits=confidences.stacked() if confidences.outputs else None,
        confidence=torch.from_numpy(outcome.block.confidence),
        draft_ids=torch.from_numpy(outcome.block.ids).long(),
        texts=texts,
        d2t=d2t_W,
    )


def _open(checkpoint: Path, target: Path) -> DraftEngine | AutoregressiveEngine:
    if checkpoint_kind(checkpoint) == "dspark":
        return make_engine(load_drafter(checkpoint, target))
    return AutoregressiveEngine(
        load_autoregressive(checkpoint, target),
        max_sessions=64,
        max_session_tokens=1 << 14,
        idle_session_s=60.0,
        q_top_k=8,
    )


class _Calls:
    """A forward hook that keeps what a module gave."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def __call__(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        self.outputs.append(output.clone())

    def stacked(self) -> Tensor:
        """Outputs [N, ...] of G calls as [N, G, ...]."""
        return torch.stack(self.outputs, dim=1)
