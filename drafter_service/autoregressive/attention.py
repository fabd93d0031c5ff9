"""Attention of a batch of rollouts: each new row over its session's draft KV and the rows before.

The context is gathered once for a whole block; drafted rows are appended behind it step by step and
die with the call. Sessions of similar length share one attention call, as in
`drafter_service.attention`.

Shape legend: S sessions, G gamma, T context rows, H query heads, J key/value heads, R = H / J
queries per key, E head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from cluster.drafter_spec import AutoregressiveSpec
from drafter_service.attention import similar
from drafter_service.draft_kv import DraftKV
from drafter_service.sessions import DraftSession


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Neighbouring sessions of the batch that attend in one call."""

    sessions: slice
    num_context: int
    """Padded number of context rows T."""
    kv: Tensor
    """[S, T + G, 2, J, E]"""
    mask: Tensor | None
    """[S, 1, 1, T + G], True where visible; None if everything is."""


class RolloutAttention:
    """The `drafter_service.autoregressive.model.Attend` of one block; each call is one step.

    The first step is that of the last committed row, which brings its own key and value like all
    later ones: the context is what lies before it.

    Args:
        sessions: with at least one row each, in order of rising ``covered``.
    """

    def __init__(
        self, spec: AutoregressiveSpec, kv: DraftKV, sessions: Sequence[DraftSession]
    ) -> None:
        lengths = [session.covered - 1 for session in sessions]
        assert lengths == sorted(lengths), "sort sessions by context length"
        assert lengths[0] >= 0, "a session without rows has nothing to draft from"
        self._groups = [
            _group(spec, kv, sessions[part], part, lengths[part]) for part in similar(lengths)
        ]
        self._num_steps = 0

    def __call__(self, q_SHE: Tensor, k_SJE: Tensor, v_SJE: Tensor) -> Tensor:
        """Mixed values [S, H, E] of the next step."""
        mixed = torch.empty_like(q_SHE)
        own = torch.stack([k_SJE, v_SJE], dim=1)
        for group in self._groups:
            stop = group.num_context + self._num_steps + 1
            group.kv[:, stop - 1] = own[group.sessions]
            k_SJTE, v_SJTE = group.kv[:, :stop].permute(2, 0, 3, 1, 4)
            q_SJRE = q_SHE[group.sessions].view(len(k_SJTE), k_SJTE.shape[1], -1, q_SHE.shape[-1])
            out = functional.scaled_dot_product_attention(
                q_SJRE,
                k_SJTE,
                v_SJTE,
                attn_mask=None if group.mask is None else group.mask[..., :stop],
            )
            mixed[group.sessions] = out.flatten(1, 2)
        self._num_steps += 1
        return mixed


def _group(
    spec: AutoregressiveSpec,
    kv: DraftKV,
    sessions: Sequence[DraftSession],
    part: slice,
    lengths: Sequence[int],
) -> _Group:
    num_context, gamma = lengths[-1], spec.gamma
    slots = np.zeros((len(sessions), num_context + gamma), np.int64)  # 0: the padding block
    for row, (session, length) in enumerate(zip(sessions, lengths, strict=True)):
        slots[row, :length] = session.slots(0, length)
    mask = None
    if lengths[0] < num_context:
        visible = np.ones(slots.shape, bool)
        visible[:, :num_context] = np.arange(num_context) < np.asarray(lengths)[:, None]
        mask = torch.from_numpy(visible).to(kv.device)[:, None, None]
    flat = torch.from_numpy(slots.reshape(-1)).to(kv.device)
    return _Group(
        sessions=part,
        num_context=num_context,
        kv=kv.gather(0, flat).view(*slots.shape, 2, spec.num_kv_heads, spec.head_dim),
        mask=mask,
    )
