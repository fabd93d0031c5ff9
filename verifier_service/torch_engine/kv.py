"""Target KV in fixed-size blocks: who holds which blocks, and the tensors behind them.

Reservation policy: admission reserves every block that the request can ever need, so an admitted
request always finishes and is never preempted; what does not fit is refused at once. The allocator
prefers one contiguous run per request, because attention then reads keys and values as a view.
Copying the context of every row at every layer would cost about as much as reading the weights.

Shape legend: J key/value heads, S slots (block size times blocks), E head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verifier_service.torch_engine.block_index import BlockIndex

_LENT: Final = np.iinfo(np.int64).max
"""Cost of a block that somebody has."""


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """The blocks of one request, in position order."""

    blocks: tuple[int, ...]
    block_tokens: int

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return len(self.blocks) * self.block_tokens

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether position p lies at slot ``start + p`` for every p."""
        return all(after == block + 1 for block, after in pairwise(self.blocks))

    @property
    def start(self) -> int:
        """Slot of position 0."""
        return self.blocks[0] * self.block_tokens

    def slots(self, first: int, num: int) -> list[int]:
        """Slots of positions ``first .. first + num - 1``."""
        if self.is_contiguous:
            return list(range(self.start + first, self.start + first + num))
        size = self.block_tokens
        return [self.blocks[p // size] * size + p % size for p in range(first, first + num)]


class BlockAllocator:
    """Lends runs of blocks. Pure bookkeeping: knows numbers, not tensors.

    A block that was given back goes on holding what its request computed, and can be found in
    ``index`` until it is lent again; of all places where a run fits, the one is taken that costs
    least of that. The first such, so that equal requests lie equally spaced.
    """

    def __init__(self, *, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.free_blocks = num_blocks
        self.index = BlockIndex(num_blocks)
        self._lent = np.zeros(num_blocks, np.bool_)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` positions need."""
        return -(-num_tokens // self.block_tokens)

    def is_free(self, block: int) -> bool:
        """Whether nobody has been lent this block."""
        return not self._lent[block]

    def reserve(self, num_tokens: int) -> Reservation | None:
        """Blocks for ``num_tokens`` positions, None when there are not enough.

        One run where any free run is long enough: the one whose most recently used block was used
        least recently. Else the longest runs one after the other.
        """
        wanted = self.blocks_for(num_tokens)
        if wanted > self.free_blocks:
            return None
        blocks = self._run(wanted) or self._scattered(wanted)
        self._lent[list(blocks)] = True
        self.free_blocks -= wanted
        self.index.drop(blocks)
        return Reservation(blocks=tuple(blocks), block_tokens=self.block_tokens)

    def release(self, reservation: Reservation) -> None:
        """Give blocks back; releasing a block that is free is a fault of ours."""
        blocks = list(reservation.blocks)
        assert bool(self._lent[blocks].all()), "block released twice"
        self._lent[blocks] = False
        self.free_blocks += len(blocks)

    def _run(self, wanted: int) -> range | None:
        """The cheapest run of free blocks, None if no free run is so long."""
        cost = _window_max(np.where(self._lent, _LENT, self.index.worth), wanted)
        start = int(cost.argmin())
        return None if cost[start] == _LENT else range(start, start + wanted)

    def _scattered(self, wanted: int) -> list[int]:
        free = np.flatnonzero(~self._lent)
        runs = np.split(free, np.flatnonzero(np.diff(free) > 1) + 1)
        runs.sort(key=len, reverse=True)
        blocks: list[int] = np.concatenate(runs)[:wanted].tolist()
        return blocks


def _window_max(values: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Largest value of each window, by the window's start."""
    done = 1
    while done < width:
        more = min(done, width - done)
        values = np.maximum(values[:-more], values[more:])
        done += more
    return values


class KVCache:
    """Keys (rotated) and values of all layers, one [J, S, E] tensor each.

    Heads come first, so that the keys of one head of one contiguous request are one dense
    matrix. Memory starts as zeros: attention may multiply stale slots by a weight of exactly 0,
    which is only harmless while they are finite.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_kv_heads, num_slots, head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    def write(self, layer: int, slots_T: Tensor, k_TJE: Tensor, v_TJE: Tensor) -> None:
        """Store new positions. Rejected ones are overwritten by the next step that gets there."""
        self.keys[layer].index_copy_(1, slots_T, k_TJE.transpose(0, 1))
        self.values[layer].index_copy_(1, slots_T, v_TJE.transpose(0, 1))

    def copy_blocks(
        self, sources: Sequence[int], targets: Sequence[int], block_tokens: int
    ) -> None:
        """Copy whole blocks, all layers. Sources and targets may overlap in any way."""
        device = self.keys[0].device
        from_B = torch.tensor(sources, device=device)
        to_B = torch.tensor(targets, device=device)
        for tensor in (*self.keys, *self.values):
            J, _, E = tensor.shape
            blocks = tensor.view(J, -1, block_tokens * E)
            blocks.index_copy_(1, to_B, blocks.index_select(1, from_B))

    def clear(self, slots: list[int]) -> None:
        """Zero these slots of every layer, once a request has put infinities or NaN there."""
        for tensor in (*self.keys, *self.values):
            tensor[:, slots] = 0
