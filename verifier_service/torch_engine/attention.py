"""Attention of ragged rows over the KV blocks: which rows run together, and how.

Rows of equal query length and similar context whose KV runs are equally spaced in memory are one
batched call on a strided view of the cache: no padding of queries, no copy of keys. Any two rows
are equally spaced; requests of equal size, admitted one after the other, are so by the dozen. On
two cores that took a third to a half off per-row calls. A request whose blocks are scattered is
gathered and runs alone.

A batch reads up to the longest context among its rows, and only inside each row's own
reservation: what a short row reads past its end is masked, and never another request's.

Shape legend: R rows of a group, N query tokens per row, L keys per row, T flattened tokens, H
query heads, J key/value heads, G query heads per key/value head, E head dimension, S slots.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from verifier_service.torch_engine.kv import KVCache, Reservation

_MOST_FOLDED = 16
"""Longest row whose G query heads are folded into the query axis (measured: faster from 2 on),
and that is batched with others; longer rows fill the cores by themselves."""
_LENGTH_RATIO = 1.3
"""Contexts within one batch differ by at most this factor: what is read in vain stays small."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Tokens of one request to compute in this step, at positions ``first ..``."""

    ids: Sequence[int]
    first: int
    reservation: Reservation
    num_logits: int
    """Trailing tokens whose logits are wanted."""

    @property
    def end(self) -> int:
        """Keys that the last token sees."""
        return self.first + len(self.ids)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows of one attention call. Tokens ``token .. token + R * N - 1`` of the batch."""

    token: int
    num_rows: int
    num_queries: int
    num_keys: int
    start: int
    """Slot of the first row's position 0."""
    spacing: int
    """Slots from one row's position 0 to the next row's."""
    gathered: Tensor | None
    """Scattered blocks: the slots [L] to gather."""
    causal: bool
    """One whole prompt from position 0: the kernel's own causal rule, no mask."""
    masks: dict[int | None, Tensor | None]
    """Per sliding window (None: all visible): additive mask [R, 1, N or N * G, L], or no mask."""

    @property
    def folded(self) -> bool:
        return 1 < self.num_queries <= _MOST_FOLDED


def arrange(spans: Sequence[Span]) -> list[list[int]]:
    """Indices of ``spans`` that run together, group by group."""
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    groups: list[list[int]] = []
    for index, span in enumerate(spans):
        if len(span.ids) > _MOST_FOLDED or not span.reservation.is_contiguous:
            groups.append([index])
        else:
            bucket = int(math.log(max(span.end, 64)) / math.log(_LENGTH_RATIO))
            alike[len(span.ids), bucket].append(index)
    for members in alike.values():
        groups.extend(_equally_spaced(spans, members))
    return groups


def _equally_spaced(spans: Sequence[Span], members: list[int]) -> list[list[int]]:
    members.sort(key=lambda index: spans[index].reservation.start)
    groups: list[list[int]] = []
    for index in members:
        if groups and _joins(spans, groups[-1], index):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _joins(spans: Sequence[Span], group: list[int], index: int) -> bool:
    starts = [spans[i].reservation.start for i in (*group, index)]
    if len(group) > 1 and starts[-1] - starts[-2] != starts[1] - starts[0]:
        return False
    rows = [spans[i] for i in (*group, index)]
    return max(row.end for row in rows) <= min(row.reservation.capacity for row in rows)


def build_group(
    rows: Sequence[Span],
    *,
    token: int,
    windows: frozenset[int | None],
    heads_per_kv: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Group:
    """Everything about a group that is the same at every layer."""
    num_queries, num_keys = len(rows[0].ids), max(row.end for row in rows)
    first = rows[0].reservation
    causal = len(rows) == 1 and num_queries == num_keys > _MOST_FOLDED and windows == {None}
    firsts = torch.tensor([row.first for row in rows], device=device)
    fold = heads_per_kv if 1 < num_queries <= _MOST_FOLDED else 1
    masks = {
        window: None if causal else _mask(firsts, num_queries, num_keys, window, fold, dtype)
        for window in windows
    }
    slots = None if first.is_contiguous else first.slots(0, num_keys)
    return Group(
        token=token,
        num_rows=len(rows),
        num_queries=num_queries,
        num_keys=num_keys,
        start=first.start,
        spacing=rows[1].reservation.start - first.start if len(rows) > 1 else 0,
        gathered=None if slots is None else torch.tensor(slots, device=device),
        causal=causal,
        masks=masks,
    )


def _mask(
    firsts_R: Tensor,
    num_queries: int,
    num_keys: int,
    window: int | None,
    fold: int,
    dtype: torch.dtype,
) -> Tensor | None:
    """Additive mask [R, 1, N * fold, L]: position p sees ``max(0, p - window + 1) .. p``."""
    offsets_N = torch.arange(num_queries, device=firsts_R.device)
    queries_RN1 = (firsts_R[:, None] + offsets_N)[:, :, None]
    keys_L = torch.arange(num_keys, device=firsts_R.device)
    hidden_RNL = keys_L > queries_RN1
    if window is not None:
        hidden_RNL |= keys_L <= queries_RN1 - window
    if not bool(hidden_RNL.any()):
        return None
    mask = torch.zeros(hidden_RNL.shape, dtype=dtype, device=firsts_R.device)
    return mask.masked_fill_(hidden_RNL, -math.inf).repeat_interleave(fold, dim=1)[:, None]


def attend(
    groups: Sequence[Group], q_THE: Tensor, cache: KVCache, layer: int, window: int | None
) -> Tensor:
    """Mixed values [T, H * E] of all rows; keys and values of this step are already written."""
    if len(groups) == 1:
        return _attend_group(groups[0], q_THE, cache, layer, window)
    return torch.cat(
        [
            _attend_group(
                group,
                q_THE[group.token : group.token + group.num_rows * group.num_queries],
                cache,
                layer,
                window,
            )
            for group in groups
        ]
    )


def _attend_group(
    group: Group, q_THE: Tensor, cache: KVCache, layer: int, window: int | None
) -> Tensor:
    R, N = group.num_rows, group.num_queries
    H, E = q_THE.shape[1:]
    k_RJLE, v_RJLE = (_read(group, part[layer]) for part in (cache.keys, cache.values))
    J = k_RJLE.shape[1]
    if not group.folded:
        out = scaled_dot_product_attention(
            q_THE.view(R, N, H, E).transpose(1, 2),
            k_RJLE,
            v_RJLE,
            attn_mask=group.masks[window],
            is_causal=group.causal,
            enable_gqa=H != J,
        )
        return out.transpose(1, 2).reshape(R * N, H * E)
    q = q_THE.view(R, N, J, H // J, E).transpose(1, 2).reshape(R, J, N * (H // J), E)
    out = scaled_dot_product_attention(q, k_RJLE, v_RJLE, attn_mask=group.masks[window])
    return out.view(R, J, N, H // J, E).transpose(1, 2).reshape(R * N, H * E)


def _read(group: Group, pool_JSE: Tensor) -> Tensor:
    """Keys or values [R, J, L, E] of a group: a view of the pool, a copy only where scattered."""
    if group.gathered is not None:
        return pool_JSE.index_select(1, group.gathered)[None]
    J, S, E = pool_JSE.shape
    return pool_JSE.as_strided(
        (group.num_rows, J, group.num_keys, E), (group.spacing * E, S * E, E, 1), group.start * E
    )
