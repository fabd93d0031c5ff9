"""Grouped, folded, viewed and gathered attention equals the definition, row by row."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from verifier_service.torch_engine.attention import Span, arrange, attend, build_group
from verifier_service.torch_engine.kv import KVCache, Reservation

H, J, E, BLOCK, SLOTS = 6, 2, 8, 4, 512


def make_span(num: int, first: int, start_block: int, num_blocks: int = 16) -> Span:
    reservation = Reservation(
        blocks=tuple(range(start_block, start_block + num_blocks)), block_tokens=BLOCK
    )
    return Span(ids=[0] * num, first=first, reservation=reservation, num_logits=0)


def random_cache() -> KVCache:
    torch.manual_seed(0)
    cache = KVCache(
        num_layers=1,
        num_slots=SLOTS,
        num_kv_heads=J,
        head_dim=E,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    cache.keys[0].normal_()
    cache.values[0].normal_()
    return cache


def by_definition(
    q_NHE: torch.Tensor, span: Span, cache: KVCache, window: int | None
) -> torch.Tensor:
    out = torch.zeros_like(q_NHE)
    for n in range(q_NHE.shape[0]):
        position = span.first + n
        low = 0 if window is None else max(0, position - window + 1)
        slots = span.reservation.slots(low, position + 1 - low)
        for h in range(H):
            k = cache.keys[0][h // (H // J), slots]
            v = cache.values[0][h // (H // J), slots]
            out[n, h] = (k @ q_NHE[n, h] / math.sqrt(E)).softmax(0) @ v
    return out.flatten(1)


def grouped(
    spans: Sequence[Span], q: Sequence[torch.Tensor], cache: KVCache, window: int | None
) -> tuple[list[torch.Tensor], list[list[int]]]:
    members = arrange(spans)
    groups, token = [], 0
    for indices in members:
        rows = [spans[i] for i in indices]
        groups.append(
            build_group(
                rows,
                token=token,
                windows=frozenset({window, None}),
                heads_per_kv=H // J,
                dtype=torch.float32,
                device=torch.device("cpu"),
            )
        )
        token += sum(len(row.ids) for row in rows)
    order = [i for indices in members for i in indices]
    mixed = attend(groups, torch.cat([q[i] for i in order]), cache, 0, window)
    parts = mixed.split([len(spans[i].ids) for i in order])
    return [parts[order.index(i)] for i in range(len(spans))], members


SCATTERED = Span(
    ids=[0] * 3,
    first=10,
    reservation=Reservation(blocks=(127, 40, 3, 99), block_tokens=BLOCK),
    num_logits=0,
)
MIXTURES = {
    "one token": [make_span(1, 30, 0)],
    "first token": [make_span(1, 0, 0)],
    "block": [make_span(5, 30, 0)],
    "plain rows, equal contexts": [make_span(1, 20, 16 * i) for i in range(4)],
    "plain rows, unequal contexts": [make_span(1, 20 + i, 16 * i) for i in range(4)],
    "blocks, equally spaced": [make_span(5, 20 + 3 * i, 16 * i) for i in range(4)],
    "blocks, unequally spaced": [make_span(4, 20 + i, s) for i, s in enumerate((0, 16, 48, 100))],
    "whole long prompt": [make_span(40, 0, 0)],
    "chunk of a prompt": [make_span(24, 17, 8)],
    "scattered": [SCATTERED],
    "everything": [
        make_span(1, 20, 0),
        make_span(5, 30, 16),
        make_span(40, 0, 32),
        make_span(1, 24, 48),
        make_span(5, 28, 64),
        SCATTERED,
        make_span(2, 0, 80),
    ],
}


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("name", MIXTURES)
def test_equals_the_definition(name: str, window: int | None) -> None:
    spans, cache = MIXTURES[name], random_cache()
    q = [torch.randn(len(span.ids), H, E) for span in spans]
    mixed, _ = grouped(spans, q, cache, window)
    for span, query, got in zip(spans, q, mixed, strict=True):
        torch.testing.assert_close(got, by_definition(query, span, cache, window))


def test_equally_spaced_rows_of_like_context_are_one_call() -> None:
    spans = [make_span(3, 20 + i, 16 * i) for i in range(6)]
    assert [sorted(group) for group in arrange(spans)] == [[0, 1, 2, 3, 4, 5]]


def test_any_two_rows_are_one_call() -> None:
    assert len(arrange([make_span(3, 20, 70), make_span(3, 21, 3)])) == 1


def test_unlike_rows_stay_apart() -> None:
    contexts = [make_span(1, 20, 0, 30), make_span(1, 100, 40, 30)]
    widths = [make_span(1, 20, 0), make_span(2, 20, 16)]
    assert len(arrange(contexts)) == len(arrange(widths)) == 2


def test_a_batch_reads_only_what_its_rows_own() -> None:
    """Row 1 has room for 20 positions; row 0 would have it read 24, into its neighbour's."""
    spans = [make_span(1, 23, 0, 6), make_span(1, 18, 6, 5)]
    assert len(arrange(spans)) == 2
    cache = random_cache()
    cache.keys[0][:, 11 * BLOCK :] = math.nan
    cache.values[0][:, 11 * BLOCK :] = math.nan
    mixed, _ = grouped(spans, [torch.randn(1, H, E) for _ in spans], cache, None)
    assert all(bool(part.isfinite().all()) for part in mixed)
