"""Attention of a batch of blocks over the draft KV of their sessions (paper equation 3).

Sessions of different context lengths share one pass of the backbone. Within it, sessions of
similar length share one attention call, padded to the longest of them and masked, so that one long
context does not make every short one pay. Full layers see the whole context, layers with a window
its last positions; the block sees itself in both directions (or, where the checkpoint says so,
backwards only). The block's keys and values live in a scratch tensor of the call and die with it.

Shape legend: S sessions, G block width, T context length, H query heads, J key/value heads,
R = H / J queries per key, E head dimension, N = S * G block positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from cluster.drafter_spec import DrafterSpec
from drafter_service.draft_kv import DraftKV
from drafter_service.sessions import DraftSession

_SLACK: Final = 64
"""Padding that is always worth an attention call saved."""


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Neighbouring sessions of the batch that attend in one call."""

    sessions: slice
    num_context: int
    """Padded context length T."""
    slots: Tensor
    """[S * (T + G)] KV slots; the last G of each session are placeholders for the block."""
    mask: Tensor | None
    """[S, 1, 1 or R*G, T + G], True where visible; None if everything is."""


class BlockAttention:
    """The `drafter_service.backbone.Attend` of one batch of blocks.

    Args:
        sessions: in order of rising ``covered``, so that similar lengths are neighbours.
    """

    def __init__(self, spec: DrafterSpec, kv: DraftKV, sessions: Sequence[DraftSession]) -> None:
        self._spec = spec
        self._kv = kv
        self._num_sessions = len(sessions)
        lengths = [session.covered for session in sessions]
        assert lengths == sorted(lengths), "sort sessions by context length"
        self._groups = {
            window: [
                _group(spec, kv.device, sessions[part], part, window)
                for part in similar([min(n, window or n) for n in lengths])
            ]
            for window in set(spec.sliding_windows)
        }

    def __call__(self, layer: int, q_NHE: Tensor, k_NJE: Tensor, v_NJE: Tensor) -> Tensor:
        """Mixed values [N, H, E] of one layer."""
        spec, width = self._spec, self._spec.block_width
        num, heads, size = self._num_sessions, spec.num_kv_heads, spec.head_dim
        q = q_NHE.reshape(num, width, heads, -1, size)
        block = torch.stack([k_NJE, v_NJE], dim=1).view(num, width, 2, heads, size)
        mixed = torch.empty_like(q)
        for group in self._groups[spec.sliding_windows[layer]]:
            # The R queries of a key head lie behind each other: keys are read once, not R times.
            q_SJQE = q[group.sessions].permute(0, 2, 3, 1, 4).flatten(2, 3)
            kv = self._kv.gather(layer, group.slots).view(q_SJQE.shape[0], -1, 2, heads, size)
            kv[:, group.num_context :] = block[group.sessions]
            k_SJTE, v_SJTE = kv.unbind(2)
            out_SJQE = functional.scaled_dot_product_attention(
                q_SJQE, k_SJTE.transpose(1, 2), v_SJTE.transpose(1, 2), attn_mask=group.mask
            )
            out = out_SJQE.reshape(q_SJQE.shape[0], heads, -1, width, size)
            mixed[group.sessions] = out.permute(0, 3, 1, 2, 4)
        return mixed.flatten(2, 3).flatten(0, 1)


def similar(lengths: Sequence[int]) -> list[slice]:
    """Cut a rising sequence so that no part's longest exceeds twice its shortest by much."""
    parts, start = [], 0
    for index, length in enumerate(lengths):
        if length > 2 * lengths[start] + _SLACK:
            parts.append(slice(start, index))
            start = index
    return [*parts, slice(start, len(lengths))]


def _group(
    spec: DrafterSpec,
    device: torch.device,
    sessions: Sequence[DraftSession],
    part: slice,
    window: int | None,
) -> _Group:
    visible_S = np.array([min(s.covered, window or s.covered) for s in sessions])
    num_context, width = int(visible_S.max()), spec.block_width
    slots = np.zeros((len(sessions), num_context + width), np.int64)  # 0: the padding block
    for row, (session, visible) in enumerate(zip(sessions, visible_S, strict=True)):
        slots[row, :visible] = session.slots(session.covered - int(visible), session.covered)
    mask: NDArray[np.bool_] | None = None
    if window is not None and spec.causal_sliding_blocks:
        repeats = spec.num_heads // spec.num_kv_heads
        seen = np.tile(np.tri(width, dtype=bool), (repeats, 1))
        mask = np.ones((len(sessions), 1, repeats * width, num_context + width), bool)
        mask[..., num_context:] = seen
    elif visible_S.min() < num_context:
        mask = np.ones((len(sessions), 1, 1, num_context + width), bool)
    if mask is not None:
        padding = np.arange(num_context) >= visible_S[:, None]
        mask[..., :num_context] &= ~padding[:, None, None]
    return _Group(
        sessions=part,
        num_context=num_context,
        slots=torch.from_numpy(slots.reshape(-1)).to(device),
        mask=None if mask is None else torch.from_numpy(mask).to(device),
    )
