"""Which KV blocks hold what: found by hash until their memory is lent again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class BlockIndex:
    """Hashes of whole blocks (`verifier_service.prefix_rows.block_hashes`) and where they lie.

    Several blocks may hold the same; the one that came last is found, and the others are worth
    nothing. Pure bookkeeping: knows numbers, not tensors, nor who has been lent which block.
    """

    def __init__(self, num_blocks: int) -> None:
        self._worth = np.zeros(num_blocks, np.int64)
        self._clock = 0
        self._hash_of: dict[int, bytes] = {}
        self._blocks_of: dict[bytes, list[int]] = {}  # the one that is found comes last

    @property
    def worth(self) -> NDArray[np.int64]:
        """By block: 0 where nothing would be lost, else the higher the later it was used."""
        return self._worth

    @property
    def num_hashes(self) -> int:
        """Different blocks that can be found."""
        return len(self._blocks_of)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the leading hashes that are known."""
        found: list[int] = []
        for block_hash in hashes:
            blocks = self._blocks_of.get(block_hash)
            if blocks is None:
                break
            found.append(blocks[-1])
        return found

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Count the known ones of a chain as used, its head last: without it, the rest is lost."""
        for block_hash in reversed(hashes):
            blocks = self._blocks_of.get(block_hash)
            if blocks is not None:
                self._worth[blocks[-1]] = self._tick()

    def put(self, block: int, block_hash: bytes) -> None:
        """``block`` holds this from now on, as the one that is found."""
        if self._hash_of.get(block) == block_hash:
            return
        assert block not in self._hash_of, f"block {block} holds something else"
        others = self._blocks_of.setdefault(block_hash, [])
        if others:
            self._worth[others[-1]] = 0
        others.append(block)
        self._hash_of[block] = block_hash
        self._worth[block] = self._tick()

    def drop(self, blocks: Iterable[int]) -> None:
        """What these blocks hold is about to be overwritten."""
        for block in blocks:
            block_hash = self._hash_of.pop(block, None)
            if block_hash is None:
                continue
            others = self._blocks_of[block_hash]
            others.remove(block)
            if not others:
                del self._blocks_of[block_hash]
            elif self._worth[block]:
                self._worth[others[-1]] = self._worth[block]
            self._worth[block] = 0

    def forget(self, hashes: Iterable[bytes]) -> list[int]:
        """Find these no more. Returns the blocks that held them."""
        blocks = [block for h in hashes for block in self._blocks_of.get(h, ())]
        self.drop(blocks)
        return blocks

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
