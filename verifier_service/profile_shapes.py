"""Which shapes of step the start-up profile measures. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from verifier_service.engine import EngineLimits, StepShape

_ROW_TOKENS: Final = 8
"""Of a usual row: an anchor and a block of 7."""
_FINE: Final = 128
"""Sizes above are large steps: each costs as much time as dozens of small ones."""


def ladder(most: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, ... 96, 128, then in doubles, up to and including ``most``."""
    assert most >= 1, most
    sizes = {1, most}
    power = 2
    while power <= most:
        sizes |= {power, power + power // 2} if power < _FINE else {power}
        power *= 2
    return tuple(size for size in sorted(sizes) if size <= most)


def size_of(shape: StepShape) -> tuple[int, ...]:
    """Order of measuring: small first, for small sizes are where the choices are."""
    total = shape.num_tokens + shape.num_prefill
    return (total, shape.num_pairs, shape.num_rows, shape.num_prefill)


def contexts(limits: EngineLimits, near: int, far: int) -> tuple[int, int]:
    """Both contexts as far as the model and its KV go with sixteen rows."""
    room = limits.kv_blocks * limits.kv_block_tokens // 16 - _ROW_TOKENS
    most = max(min(limits.max_model_len - _ROW_TOKENS, room), 0)
    return min(near, most), min(far, most)


def rung(size: int, context: int, limits: EngineLimits) -> StepShape:
    """A step of the ladder: blocks of eight tokens, longer where that would be too many rows."""
    width = max(_ROW_TOKENS, -(-size // max(limits.max_requests, 1)))
    most = min(limits.max_model_len, limits.kv_blocks * limits.kv_block_tokens)
    width = min(width, max(most - context, 1))
    return StepShape(num_tokens=size, row_tokens=width, context=context)


def probes(sizes: Iterable[int], near: int, far: int, limits: EngineLimits) -> Iterable[StepShape]:
    """Shapes that tell the costs apart, of the ladder's own sizes, small to middling."""
    usable = [size for size in sizes if size <= min(limits.max_requests, 32)]
    for size in {usable[-1], usable[len(usable) // 2]}:
        yield StepShape(num_tokens=size, row_tokens=1, context=near)
        yield StepShape(num_tokens=size, row_tokens=1, context=far)
        yield StepShape(num_tokens=size, row_tokens=_ROW_TOKENS, context=far)
    yield StepShape(num_tokens=1, row_tokens=1, context=far)
    chunks = [size for size in sizes if 8 <= size <= _FINE]
    for size in {chunks[-1], chunks[len(chunks) // 2]} if chunks else set():
        yield StepShape(num_tokens=0, context=0, num_prefill=size)
        if far + size <= limits.max_model_len:
            yield StepShape(num_tokens=0, context=far, num_prefill=size)
        elif far > size:
            yield StepShape(num_tokens=0, context=far - size, num_prefill=size)
