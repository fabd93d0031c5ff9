"""Prompts whose beginning is in the KV already: found, copied into place, and kept for others.

Attention reads each request's keys and values as one contiguous run, so blocks are never shared:
what is found is copied into the new request's own reservation, all layers (0.3% of the time that
computing it takes, measured). Blocks of live and of finished requests can be found, the latter
until their memory is lent again (`kv.BlockAllocator`).

Where projected rows are handed out, a hit ends with the blocks whose rows are kept too: a drafter
must see the same whether a prompt was computed or found.

One request, in reading order: `PrefixCache.find` and `fill` at its admission, when what it needs
may be about to be lent to it; `begin` with its first chunk, when more may be there, and rows may be
gone; `keep` behind every commit; `leave` at its end.

Shape legend: T positions, D draft hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from cluster.wire import Admission
from verifier_service.prefix_rows import BlockFiller, PrefixRows, block_hashes
from verifier_service.torch_engine.kv import BlockAllocator, KVCache
from verifier_service.torch_engine.requests import Request


@dataclass(frozen=True, kw_only=True)
class Found:
    """What is there of a request's prompt."""

    hashes: list[bytes]
    """Of all its blocks that could be found."""
    blocks: list[int]
    """Of the leading ones that were."""


NOTHING = Found(hashes=[], blocks=[])


class PrefixCache:
    """Keys and values by the hash of the ids that they stand for.

    Args:
        allocator: lends the blocks of ``kv``; its index says what they hold.
        rows: of the projection, None where none are handed out.
        enabled: False finds nothing and keeps nothing.
    """

    def __init__(
        self, allocator: BlockAllocator, kv: KVCache, *, rows: PrefixRows | None, enabled: bool
    ) -> None:
        self._allocator = allocator
        self._index = allocator.index
        self._kv = kv
        self._rows = rows
        self._enabled = enabled

    def gauges(self) -> dict[str, float]:
        """See `StepOutcome.gauges`."""
        gauges = {"prefix_blocks": float(self._index.num_hashes)}
        if self._rows is not None:
            gauges["prefix_rows_bytes"] = float(self._rows.num_bytes)
            gauges["prefix_rows_evicted"] = float(self._rows.num_evicted)
        return gauges

    def find(self, admission: Admission, ids: Sequence[int], known: Sequence[bytes] = ()) -> Found:
        """The leading blocks of ``ids``; never the last id's: its successor is to be sampled.

        Args:
            known: hashes of leading blocks.
        """
        if not self._enabled:
            return NOTHING
        hashes = block_hashes(
            ids[:-1], self._allocator.block_tokens, salt=_salt(admission), known=known
        )
        blocks = self._index.find(hashes)
        if self._rows is not None:
            del blocks[self._rows.hits(hashes[: len(blocks)]) :]
        return Found(hashes=hashes, blocks=blocks)

    def fill(self, request: Request, found: Found) -> None:
        """Copy what was found for a request to where it wants it. Nothing of it is computed yet.

        The blocks found may have been lent to it meanwhile: nobody has written to them.
        """
        targets = request.reservation.blocks[: len(found.blocks)]
        moves = [(a, b) for a, b in zip(found.blocks, targets, strict=True) if a != b]
        if moves:
            sources, places = zip(*moves, strict=True)
            self._kv.copy_blocks(sources, places, self._allocator.block_tokens)
        request.hashes = found.hashes
        request.num_cached = len(targets) * self._allocator.block_tokens
        request.num_indexed = max(request.num_indexed, len(targets))
        for block, block_hash in zip(targets, found.hashes, strict=False):
            self._index.put(block, block_hash)

    def begin(self, request: Request) -> Tensor | None:
        """Look again before the first chunk. Returns the rows [T, D] of what need not be computed.

        None if there is nothing, or no projection.
        """
        self.fill(request, self.find(request.admission, request.ids, request.hashes))
        num_blocks = request.num_cached // self._allocator.block_tokens
        if self._rows is None or not self._enabled:
            return None
        request.filler = BlockFiller(
            self._rows, salt=_salt(request.admission), first_position=request.num_cached
        )
        return self._rows.rows(request.hashes[:num_blocks]) if num_blocks else None

    def keep(self, request: Request, first_position: int, rows_TD: Tensor | None) -> None:
        """Behind a commit: the blocks that it made whole can be found from now on.

        Args:
            rows_TD: projected rows of the positions just computed, from ``first_position`` on.
        """
        if not self._enabled:
            return
        size = self._allocator.block_tokens
        num_whole = request.num_computed // size
        if num_whole > len(request.hashes):
            request.hashes = block_hashes(
                request.ids[: num_whole * size],
                size,
                salt=_salt(request.admission),
                known=request.hashes,
            )
        for place in range(request.num_indexed, num_whole):
            self._index.put(request.reservation.blocks[place], request.hashes[place])
        request.num_indexed = max(request.num_indexed, num_whole)
        if request.filler is not None and rows_TD is not None:
            request.filler.extend(first_position, rows_TD, request.ids)

    def leave(self, request: Request) -> None:
        """A request gives its blocks back: from now on they are as old as its end."""
        self._index.touch(request.hashes)

    def forget(self, request: Request) -> None:
        """Nothing of a request is to be trusted, nor what it was copied from: find it no more.

        Blocks that nobody has are zeroed: attention multiplies stale ones by 0, which NaN survives.
        """
        if self._rows is not None:
            self._rows.forget(request.hashes)
        size = self._allocator.block_tokens
        free = [b for b in self._index.forget(request.hashes) if self._allocator.is_free(b)]
        self._kv.clear([slot for b in free for slot in range(b * size, (b + 1) * size)])


def _salt(admission: Admission) -> bytes:
    """What a request's states depend on beside its ids."""
    return admission.adapter.encode()
