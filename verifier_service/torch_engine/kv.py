"""Target KV in fixed-size blocks: who holds which blocks, and the tensors behind them.

Reservation policy: admission reserves every block that the request can ever need, so an admitted
request always finishes and is never preempted; what does not fit is refused at once. The allocator
prefers one contiguous run per request, because attention then reads keys and values as a view.
Copying the context of every row at every layer would cost about as much as reading the weights.

Shape legend: J key/value heads, S slots (block size times blocks), E head dimension.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """The blocks of one request, in position order."""

    blocks: tuple[int, ...]
    block_tokens: int

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return len(self.blocks) * self.block_tokens

    @property
    def is_contiguous(self) -> bool:
        """Whether position p lies at slot ``start + p`` for every p."""
        return not self.blocks or self.blocks[-1] - self.blocks[0] == len(self.blocks) - 1

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
    """First-fit allocation of block runs. Pure bookkeeping: knows numbers, not tensors."""

    def __init__(self, *, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._runs: list[range] = [range(num_blocks)] if num_blocks else []
        """Free runs, rising, never touching."""

    @property
    def free_blocks(self) -> int:
        return sum(map(len, self._runs))

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` positions need."""
        return -(-num_tokens // self.block_tokens)

    def reserve(self, num_tokens: int) -> Reservation | None:
        """Blocks for ``num_tokens`` positions, None when there are not enough.

        One run where any free run is long enough (the first such, so that equal requests lie
        equally spaced), else the longest runs one after the other.
        """
        wanted = self.blocks_for(num_tokens)
        if wanted > self.free_blocks:
            return None
        fitting = next((run for run in self._runs if len(run) >= wanted), None)
        pieces = [fitting] if fitting is not None else sorted(self._runs, key=len, reverse=True)
        blocks: list[int] = []
        for run in pieces:
            taken = run[: wanted - len(blocks)]
            blocks.extend(taken)
            self._cut(run, len(taken))
            if len(blocks) == wanted:
                break
        return Reservation(blocks=tuple(blocks), block_tokens=self.block_tokens)

    def release(self, reservation: Reservation) -> None:
        """Give blocks back; releasing a block that is free is a fault of ours."""
        for run in _runs_of(reservation.blocks):
            at = bisect_left(self._runs, run.start, key=lambda free: free.start)
            before = self._runs[at - 1] if at else range(-1, -1)
            after = self._runs[at] if at < len(self._runs) else range(self.num_blocks + 1, -1)
            assert before.stop <= run.start, "block released twice"
            assert run.stop <= after.start, "block released twice"
            low, high = run.start, run.stop
            if before.stop == low and at:
                low, at = before.start, at - 1
                del self._runs[at]
            if after.start == high:
                high = after.stop
                del self._runs[at]
            self._runs.insert(at, range(low, high))

    def _cut(self, run: range, num: int) -> None:
        at = self._runs.index(run)
        rest = run[num:]
        self._runs[at : at + 1] = [rest] if rest else []


def _runs_of(blocks: tuple[int, ...]) -> list[range]:
    """Maximal runs of consecutive block numbers, in any order."""
    runs: list[range] = []
    for block in sorted(blocks):
        if runs and runs[-1].stop == block:
            runs[-1] = range(runs[-1].start, block + 1)
        else:
            runs.append(range(block, block + 1))
    return runs


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

    def clear(self, slots: list[int]) -> None:
        """Zero these slots of every layer, once a request has put infinities or NaN there."""
        for tensor in (*self.keys, *self.values):
            tensor[:, slots] = 0
