"""Projected rows of prefixes that were computed before, by the hash of what they stand for.

A target that finds a prompt's beginning in its KV computes no hidden states for it, but the drafter
needs their projection. So both engines keep the rows of whole blocks of positions in host memory,
under the hash chain that they key their KV by: the hash of a block covers all ids up to its end,
and the salt (what else the rows depend on: an adapter of the target, the drafter's projection).

One request, in reading order: `block_hashes` of its ids, `PrefixRows.hits` to see how far rows
are kept, `PrefixRows.rows` to serve them, and a `BlockFiller` that stores what it commits.

Shape legend: T rows of a chunk, B rows of a block, D draft hidden size.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

_HASH_BYTES: Final = 32
"""Collisions would hand one request another's states: as wide as cryptography wants it."""


def block_hashes(
    ids: Sequence[int], block_tokens: int, *, salt: bytes = b"", known: Sequence[bytes] = ()
) -> list[bytes]:
    """Hashes of the whole blocks of ``ids``, each a function of everything up to its block's end.

    Args:
        salt: requests of different salts have no hash in common.
        known: hashes of leading blocks, computed before; they are taken over.
    """
    num_blocks = len(ids) // block_tokens
    hashes = list(known[:num_blocks])
    parent = hashes[-1] if hashes else _hash(b"", salt)
    for block in range(len(hashes), num_blocks):
        first = block * block_tokens
        parent = _hash(parent, np.array(ids[first : first + block_tokens], "<i4").tobytes())
        hashes.append(parent)
    return hashes


def _hash(parent: bytes, content: bytes) -> bytes:
    # A parent is empty (the salt's) or of one length: no two inputs run together alike.
    return hashlib.blake2b(content, digest_size=_HASH_BYTES, key=parent).digest()


class PrefixRows:
    """Rows of blocks by block hash, least recently used first out. No threads, no devices.

    Args:
        max_bytes: over all rows; 0 keeps nothing.
        block_tokens: positions of a block.
        salt: what all rows here depend on beside their hash, such as the drafter's fingerprint.
    """

    def __init__(self, *, max_bytes: int, block_tokens: int, salt: bytes = b"") -> None:
        self.block_tokens = block_tokens
        self.max_bytes = max_bytes
        self.num_evicted = 0
        """Blocks dropped for room, since the start."""
        self._salt = salt
        self._num_bytes = 0
        self._blocks: OrderedDict[bytes, Tensor] = OrderedDict()  # least recently used first

    @property
    def num_bytes(self) -> int:
        """Bytes kept now."""
        return self._num_bytes

    @property
    def num_blocks(self) -> int:
        """Blocks kept now."""
        return len(self._blocks)

    def hits(self, hashes: Sequence[bytes]) -> int:
        """Leading blocks of a chain whose rows are kept; they count as used.

        The head of the chain counts as used last: without it the rest is of no use, so the tail
        goes first.
        """
        num = 0
        while num < len(hashes) and self._key(hashes[num]) in self._blocks:
            num += 1
        for block_hash in reversed(hashes[:num]):
            self._blocks.move_to_end(self._key(block_hash))
        return num

    def rows(self, hashes: Sequence[bytes]) -> Tensor:
        """[len(hashes) * B, D] of at least one block; all must be kept (see `hits`)."""
        return torch.cat([self._blocks[self._key(block_hash)] for block_hash in hashes])

    def put(self, block_hash: bytes, rows_BD: Tensor) -> None:
        """Keep a copy of a block's rows, on the host, in place of what was used least recently.

        A block that is kept already only counts as used: its rows are the same, up to rounding.
        """
        assert rows_BD.ndim == 2, rows_BD.shape
        assert len(rows_BD) == self.block_tokens, (len(rows_BD), self.block_tokens)
        key = self._key(block_hash)
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return
        num_bytes = rows_BD.nbytes
        if num_bytes > self.max_bytes:
            return
        while self._num_bytes + num_bytes > self.max_bytes:
            self._num_bytes -= self._blocks.popitem(last=False)[1].nbytes
            self.num_evicted += 1
        self._blocks[key] = rows_BD.detach().to("cpu", copy=True)
        self._num_bytes += num_bytes

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Drop these blocks, whichever are kept: what they stand for is not to be trusted."""
        for block_hash in hashes:
            rows_BD = self._blocks.pop(self._key(block_hash), None)
            if rows_BD is not None:
                self._num_bytes -= rows_BD.nbytes

    def _key(self, block_hash: bytes) -> bytes:
        return self._salt + block_hash


class BlockFiller:
    """Gathers the rows that one request commits into whole blocks of a store.

    Args:
        salt: of the request's hashes, see `block_hashes`.
        first_position: of the first row that will come; the blocks before it are kept already, and
            one that it lies inside of is left out.
    """

    def __init__(self, store: PrefixRows, *, salt: bytes = b"", first_position: int = 0) -> None:
        self._store = store
        self._salt = salt
        self._next = first_position
        self._num_blocks = -(-first_position // store.block_tokens)
        """Blocks behind us."""
        self._pending: list[Tensor] = []
        """Rows of the block that is not whole yet."""
        self._hashes: list[bytes] = []
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether it takes no more rows: there was a gap, or no room for a chain so long."""
        return self._stopped

    def extend(self, first_position: int, rows_TD: Tensor, ids: Sequence[int]) -> None:
        """Take the rows of positions ``first_position ..``; those that came before are skipped.

        A gap stops the filler for good: blocks behind it would never be found.

        Args:
            ids: all ids committed so far, ``ids[p]`` at position p.
        """
        end = first_position + len(rows_TD)
        assert len(ids) >= end, (len(ids), end)
        if self._stopped or first_position > self._next:
            self._stop()
            return
        rows_TD = rows_TD[self._next - first_position :]
        size = self._store.block_tokens
        num_before = self._num_blocks
        while self._next < end and not self._stopped:
            start = self._num_blocks * size
            # Up to the start of the first block that can be whole, then up to its end.
            stop = min(start if self._next < start else start + size, end)
            part_TD, rows_TD = rows_TD[: stop - self._next], rows_TD[stop - self._next :]
            if self._next >= start:
                # A copy of its own: a view would keep the rows of the whole step alive with it.
                self._pending.append(part_TD if stop == start + size else part_TD.clone())
            self._next = stop
            if stop == start + size:
                self._put(ids)
        # The whole chain counts as used, its head last; it may have lost a block meanwhile.
        if self._num_blocks > num_before and self._store.hits(self._hashes) < self._num_blocks:
            self._stop()

    def _put(self, ids: Sequence[int]) -> None:
        """Store the pending rows, a whole block, if the store can hold a chain so long."""
        size = self._store.block_tokens
        rows_BD = torch.cat(self._pending) if len(self._pending) > 1 else self._pending[0]
        self._pending = []
        self._num_blocks += 1
        if self._num_blocks * rows_BD.nbytes > self._store.max_bytes:
            self._stop()  # else it would drive out its own head
            return
        self._hashes = block_hashes(
            ids[: self._num_blocks * size], size, salt=self._salt, known=self._hashes
        )
        self._store.put(self._hashes[-1], rows_BD)

    def _stop(self) -> None:
        self._stopped = True
        self._pending = []
