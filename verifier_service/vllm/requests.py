"""A request of the vLLM engine: what is kept of its rows, and what a step commits for it.

Shape legend: D draft hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.wire import FINISH_NONE, Admission
from verifier_service.acceptance import truncate
from verifier_service.engine import CommittedRows, EngineLimits
from verifier_service.live_request import LiveRequest, most_ids
from verifier_service.prefix_rows import BlockFiller, PrefixRows, block_hashes
from verifier_service.step_report import Ran, Report
from verifier_service.vllm.core import CoreRow, NewRequest


@dataclass(kw_only=True)
class VllmRequest(LiveRequest):
    """Tokens of one admitted request, and its part of the prefix cache."""

    num_blocks: int
    """KV blocks promised to it."""
    store: PrefixRows | None
    """None: no features are handed out, or no prefixes kept."""
    filler: BlockFiller | None
    hashes: list[bytes]
    """Of the whole blocks that it was admitted with."""
    cached: Tensor | None = None
    """[num_cached, D], until its first chunk has run."""
    num_cached: int = 0
    """Positions found in vLLM's prefix cache."""
    begun: bool = False
    """Its first chunk has run."""

    def limit_hit(self, num_found: int) -> int:
        """Of the prompt tokens that vLLM finds cached, those whose rows are kept too."""
        self.num_cached, self.cached = num_found, None
        if self.store is None or num_found == 0:
            return num_found
        size = self.store.block_tokens
        num_blocks = min(self.store.hits(self.hashes), num_found // size)
        self.num_cached = num_blocks * size
        if num_blocks:
            # In hand from here on: the store may drop them before the step has run.
            self.cached = self.store.rows(self.hashes[:num_blocks])
        return self.num_cached

    def ran(self, row: CoreRow) -> Ran:
        """What a step computed for it. To be asked before `commit_row`."""
        return Ran(
            first=row.first,
            num_tokens=row.num_tokens,
            is_prefill=not self.prefilled,
            num_cached=0 if self.begun else self.num_cached,
        )

    def commit_row(self, row: CoreRow, report: Report) -> CommittedRows:
        """Append what was emitted, and count the positions that stay computed: those of the chunk
        (with the first one, what the prefix cache held), or of the anchor and accepted drafts."""
        features, finish, num_rows = row.features, FINISH_NONE, row.num_tokens
        if not self.begun:
            self.begun = True
            num_rows += self.num_cached
            if self.cached is not None and features is not None:
                features = torch.cat([self.cached, features])
            self.cached = None
        first = self.num_computed
        assert row.first + row.num_tokens == first + num_rows, (self.rid, row.first, first)
        if row.verdict is not None:
            verdict, finish = truncate(
                row.verdict, stop_ids=self.stop_ids, remaining=self.remaining
            )
            self.ids.extend(verdict.token_ids)
            if self.prefilled:
                num_rows = len(verdict.token_ids)
            self.prefilled = True
            report.rows.append((self, verdict, finish))
        if features is not None:
            features = features[:num_rows]
            if self.filler is not None:
                self.filler.extend(first, features, self.ids)
        return CommittedRows(
            rid=self.rid,
            first_position=first,
            ids=self.commit(num_rows),
            digest=self.digest,
            features=features,
            prefill_done=self.prefilled,
            finished=finish != FINISH_NONE,
        )

    def forget_rows(self) -> None:
        """Its numbers are not to be trusted: leave none of them in the store."""
        if self.store is not None:
            salt = self.admission.adapter.encode()
            self.store.forget(block_hashes(self.ids, self.store.block_tokens, salt=salt))


def live_request(
    admission: Admission, limits: EngineLimits, *, num_blocks: int, store: PrefixRows | None
) -> VllmRequest:
    """The engine's side of an admitted request."""
    ids: list[int] = admission.ids.tolist()
    salt = admission.adapter.encode()
    hashes = [] if store is None else block_hashes(ids[:-1], store.block_tokens, salt=salt)
    return VllmRequest(
        admission=admission,
        most_ids=most_ids(admission, limits),
        ids=ids,
        num_blocks=num_blocks,
        store=store,
        filler=None if store is None else BlockFiller(store, salt=salt),
        hashes=hashes,
    )


def new_request(admission: Admission, limits: EngineLimits) -> NewRequest:
    """The core's side of it."""
    ids: list[int] = admission.ids.tolist()
    return NewRequest(
        rid=admission.rid,
        ids=ids,
        num_prompt=admission.num_prompt,
        max_tokens=max(most_ids(admission, limits) - len(ids), 1),
        stop_ids=tuple(admission.stop_ids.tolist()),
        sampling=admission.sampling,
        constraint_kind=admission.constraint_kind,
        constraint=admission.constraint,
        adapter=admission.adapter,
    )
