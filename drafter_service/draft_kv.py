"""Draft KV: the context half of equation 3, kept per layer in blocks of positions.

Storage grows by doubling, from little, up to a bound over all sessions. Block keys and values
never enter it: only committed positions are ever written.

Shape legend: N positions, J key/value heads, E head dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

BLOCK_POSITIONS: Final = 32
_FIRST_BLOCKS: Final = 64


class BlockAllocator:
    """Hands out up to ``num_blocks`` block numbers from 1 up. No tensors here.

    Block 0 belongs to nobody: it stays zero and serves as padding. Padding is masked, but a NaN
    left behind by one session would pass through the mask into another.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.high_water = 1
        """One more than the highest number ever handed out."""
        self._free: list[int] = []

    @property
    def num_free(self) -> int:
        """Blocks that `take` can still give."""
        return self.num_blocks + 1 - self.high_water + len(self._free)

    def take(self, num: int) -> list[int]:
        """``num`` blocks; the caller has seen that `num_free` allows it."""
        assert num <= self.num_free, "caller must check num_free"
        taken = [self._free.pop() for _ in range(min(num, len(self._free)))]
        fresh = num - len(taken)
        taken += range(self.high_water, self.high_water + fresh)
        self.high_water += fresh
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        """Return blocks taken before."""
        self._free.extend(blocks)


class DraftKV:
    """Keys (rotated) and values of all layers; slot = block * BLOCK_POSITIONS + offset."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.device = device
        self._layers = [
            torch.zeros(0, 2, num_kv_heads, head_dim, device=device, dtype=dtype)
            for _ in range(num_layers)
        ]

    def ensure(self, num_blocks: int, most_blocks: int) -> None:
        """Make room for blocks below ``num_blocks`` (at most ``most_blocks``), keeping contents."""
        have = self._layers[0].shape[0]
        if num_blocks * BLOCK_POSITIONS <= have:
            return
        blocks = min(max(num_blocks, 2 * have // BLOCK_POSITIONS, _FIRST_BLOCKS), most_blocks)
        for index, old in enumerate(self._layers):
            new = old.new_zeros(blocks * BLOCK_POSITIONS, *old.shape[1:])
            new[:have] = old
            self._layers[index] = new

    def write(self, slots_N: Tensor, per_layer: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Store keys and values [N, J, E] of each layer at their slots."""
        for layer, (k_NJE, v_NJE) in zip(self._layers, per_layer, strict=True):
            layer.index_copy_(0, slots_N, torch.stack([k_NJE, v_NJE], dim=1))

    def gather(self, layer: int, slots_N: Tensor) -> Tensor:
        """A fresh tensor [N, 2, J, E] of keys and values at these slots."""
        return self._layers[layer].index_select(0, slots_N)
