"""A core in plain Python, over the made-up law of `tests.fakes`: what vLLM would do, if told so.

KV blocks are counted, prefixes cached and requests ended as vLLM does it; what goes wrong is set by
the test, for the next step: `raises`, `broken`, `preempted`, `unrun`, `failed`.

Shape legend: T rows of one request, D draft hidden size (2: position and id, see `fake_features`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from cluster import digest
from cluster.constraints import KINDS
from cluster.errors import BadConstraint, DSparkError
from tests.fakes import VOCAB_SIZE, fake_features, target_logits
from verifier_service.acceptance import RowVerdict, VerifyRow, accept
from verifier_service.engine import EngineLimits
from verifier_service.live_request import RowDraft
from verifier_service.prefix_rows import PrefixRows
from verifier_service.vllm.core import (
    CoreFacts,
    CorePlan,
    CoreRow,
    CoreStep,
    LimitHit,
    NewRequest,
)
from verifier_service.vllm.engine import VllmEngine

BLOCK_TOKENS: Final = 4
NUM_BLOCKS: Final = 16
BAD: Final = "bad"
"""A constraint that `FakeCore.check` refuses."""


@dataclass(kw_only=True)
class _Held:
    """A request in the core."""

    new: NewRequest
    ids: list[int]
    num_computed: int = 0
    begun: bool = False

    @property
    def decodes(self) -> bool:
        return len(self.ids) > len(self.new.ids)

    @property
    def num_blocks(self) -> int:
        return -(-self.num_computed // BLOCK_TOKENS)


@dataclass(kw_only=True)
class FakeCore:
    """`verifier_service.vllm.core.Core`."""

    has_projection: bool = True
    facts: CoreFacts = field(
        default_factory=lambda: CoreFacts(
            vocab_size=VOCAB_SIZE,
            max_model_len=48,
            block_tokens=BLOCK_TOKENS,
            num_blocks=NUM_BLOCKS,
            platform="fake",
            constraint_kinds=KINDS,
            prefix_cache=True,
        )
    )
    raises: Exception | None = None
    broken: frozenset[int] = frozenset()
    preempted: frozenset[int] = frozenset()
    unrun: frozenset[int] = frozenset()
    failed: dict[int, DSparkError] = field(default_factory=dict)

    plans: list[CorePlan] = field(default_factory=list)
    """Of all steps."""
    held: dict[int, _Held] = field(default_factory=dict)
    cached: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    """Adapter and ids up to a block's end."""
    dropped: list[int] = field(default_factory=list)
    dropped_broken: list[int] = field(default_factory=list)
    num_forgotten: int = 0
    """Times that the prefix cache was emptied."""
    closed: bool = False

    @property
    def free_blocks(self) -> int:
        return self.facts.num_blocks - sum(held.num_blocks for held in self.held.values())

    def check(self, request: NewRequest) -> None:
        if request.constraint == BAD:
            raise BadConstraint(f"{request.constraint_kind}: it is bad")

    def add(self, request: NewRequest) -> None:
        assert request.rid not in self.held, request.rid
        self.held[request.rid] = _Held(new=request, ids=list(request.ids))

    def add_computed(self, request: NewRequest, num_computed: int) -> bool:
        if -(-num_computed // BLOCK_TOKENS) > self.free_blocks:
            return False
        self.add(request)
        held = self.held[request.rid]
        held.num_computed, held.begun = num_computed, True
        return True

    def drop(self, rids: Collection[int]) -> None:
        self.dropped.extend(rids)
        for rid in rids:
            self.held.pop(rid, None)

    def drop_broken(self, rid: int) -> None:
        self.dropped_broken.append(rid)
        held = self.held.pop(rid)
        for num in range(0, len(held.ids) + 1, BLOCK_TOKENS):
            self.cached.discard((held.new.adapter, tuple(held.ids[:num])))

    def step(self, plan: CorePlan, limit_hit: LimitHit) -> CoreStep:
        self.plans.append(plan)
        if self.raises is not None:
            error, self.raises = self.raises, None
            raise error
        for rid in [*self.preempted, *self.failed]:
            del self.held[rid]
        preempted, failed = tuple(sorted(self.preempted)), self.failed
        absent = self.unrun | self.preempted | failed.keys()
        rows = [self._row(rid, row) for rid, row in plan.rows.items() if rid not in absent]
        rows += self._chunks(plan.prefill_budget, limit_hit)
        finished = frozenset(rid for rid, held in self.held.items() if _has_ended(held))
        for rid in finished:
            del self.held[rid]
        self.broken, self.preempted, self.unrun = frozenset(), frozenset(), frozenset()
        self.failed = {}
        return CoreStep(
            rows=tuple(rows),
            num_padded=sum(row.num_tokens for row in rows) + 3,
            preempted=preempted,
            failed=failed,
            finished=finished,
        )

    def forget_prefixes(self) -> None:
        assert not self.held, "vLLM empties its cache only while no request is there"
        self.cached.clear()
        self.num_forgotten += 1

    def close(self) -> None:
        self.closed = True

    def num_found(self, ids: Sequence[int], adapter: str = "") -> int:
        """Positions of these ids that are cached: whole blocks, and never the last token."""
        num = 0
        while num + BLOCK_TOKENS < len(ids):
            if (adapter, tuple(ids[: num + BLOCK_TOKENS])) not in self.cached:
                break
            num += BLOCK_TOKENS
        return num

    # --- computing ------------------------------------------------------------------------------

    def _row(self, rid: int, row: RowDraft) -> CoreRow:
        held = self.held[rid]
        assert held.decodes, f"a row for request {rid}, which is in prefill"
        first = len(held.ids) - 1
        verdict = self._judge(held, row)
        return self._ran(held, first, 1 + len(row.draft_ids), 1 + verdict.num_accepted, verdict)

    def _chunks(self, budget: int, limit_hit: LimitHit) -> list[CoreRow]:
        rows = []
        for rid, held in self.held.items():
            if budget == 0 or held.decodes or rid in self.unrun:
                continue
            if not held.begun:
                held.begun = True
                held.num_computed = limit_hit(rid, self.num_found(held.ids, held.new.adapter))
            first = held.num_computed
            num = min(budget, len(held.ids) - first)
            budget -= num
            is_last = first + num == len(held.ids)
            verdict = self._judge(held, RowDraft(draft_ids=(), q=None)) if is_last else None
            rows.append(self._ran(held, first, num, num, verdict))
        return rows

    def _ran(
        self, held: _Held, first: int, num_tokens: int, num_kept: int, verdict: RowVerdict | None
    ) -> CoreRow:
        """Count what was computed, and tell of it. ``num_kept``: without refused drafts."""
        broken = held.new.rid in self.broken and verdict is not None
        if verdict is not None and not broken:
            held.ids.extend(verdict.token_ids)
        held.num_computed = first + num_kept
        for end in range(BLOCK_TOKENS, held.num_computed + 1, BLOCK_TOKENS):
            self.cached.add((held.new.adapter, tuple(held.ids[:end])))
        features = None
        if self.has_projection:
            # Past the ids where the request is broken: nothing was drawn, the drafts were computed.
            known = [*held.ids, *[0] * num_kept]
            features = fake_features(known, first, first + num_kept)
        return CoreRow(
            rid=held.new.rid,
            first=first,
            num_tokens=num_tokens,
            verdict=None if broken else verdict,
            broken=broken,
            features=features,
        )

    def _judge(self, held: _Held, row: RowDraft) -> RowVerdict:
        """By the made-up law."""
        state = digest.of(held.ids)
        laws = [target_logits(state, self.facts.vocab_size)]
        for token in row.draft_ids:
            state = digest.extend(state, [token])
            laws.append(target_logits(state, self.facts.vocab_size))
        asked = VerifyRow(
            sampling=held.new.sampling,
            ids=held.ids,
            num_prompt=held.new.num_prompt,
            draft_ids=row.draft_ids,
            q=row.q,
        )
        return accept(torch.stack(laws), [asked])[0]


def _has_ended(held: _Held) -> bool:
    emitted = held.ids[len(held.new.ids) :]
    return len(emitted) >= held.new.max_tokens or any(t in held.new.stop_ids for t in emitted)


def make_engine(
    core: FakeCore, *, rows_bytes: int = 1 << 20, adapters: Sequence[str] = (), **limits: int
) -> VllmEngine:
    """The engine over a fake core, as the loader would build it."""
    facts = core.facts
    settings = {
        "max_requests": 6,
        "max_step_tokens": 32,
        "kv_blocks": facts.num_blocks,
        **limits,
    }
    rows = PrefixRows(max_bytes=rows_bytes, block_tokens=facts.block_tokens)
    return VllmEngine(
        core,
        EngineLimits(
            model_fingerprint="fake",
            vocab_size=facts.vocab_size,
            max_model_len=facts.max_model_len,
            kv_block_tokens=facts.block_tokens,
            platform=facts.platform,
            constraint_kinds=facts.constraint_kinds,
            adapters=tuple(adapters),
            **settings,
        ),
        rows if core.has_projection else None,
    )
