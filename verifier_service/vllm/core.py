"""The seam between our engine and one version of vLLM: plain data in, plain data out.

Everything that knows a private vLLM name stands behind `Core`, in one package per supported
version (`verifier_service.vllm.v0_32`); the engine in front of it knows none.

Shape legend: T rows of one request, D draft hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from cluster.errors import DSparkError
from cluster.wire import Sampling
from verifier_service.acceptance import RowVerdict
from verifier_service.live_request import RowDraft

LimitHit = Callable[[int, int], int]
"""Request id and prompt tokens that vLLM finds in its prefix cache, to those that it may use."""


@dataclass(frozen=True, kw_only=True)
class CoreFacts:
    """What a loaded core can hold and do."""

    vocab_size: int
    max_model_len: int
    block_tokens: int
    num_blocks: int
    """That requests can use."""
    platform: str
    """Version, device and parallel layout: what decides how fast it is."""
    constraint_kinds: tuple[str, ...]
    prefix_cache: bool


@dataclass(frozen=True, kw_only=True)
class NewRequest:
    """A request as vLLM is told of it. Sampling is ours: vLLM takes it for greedy."""

    rid: int
    ids: Sequence[int]
    """Prompt, and what was emitted before the request came here."""
    num_prompt: int
    max_tokens: int
    """Still to emit."""
    stop_ids: tuple[int, ...]
    sampling: Sampling
    constraint_kind: str = ""
    constraint: str = ""
    adapter: str = ""


@dataclass(frozen=True, kw_only=True)
class CorePlan:
    """What one step computes: these rows, and prompt chunks up to the budget. Requests that decode
    and are in no row are held back."""

    rows: Mapping[int, RowDraft] = field(default_factory=dict)
    prefill_budget: int = 0

    @property
    def num_row_tokens(self) -> int:
        """Anchors and drafts."""
        return sum(1 + len(row.draft_ids) for row in self.rows.values())


@dataclass(frozen=True, kw_only=True)
class CoreRow:
    """What one step computed for one request."""

    rid: int
    first: int
    """Position of the first token computed."""
    num_tokens: int
    verdict: RowVerdict | None
    """None for a prompt chunk that is not the last."""
    broken: bool
    """Its logits were not finite: nothing was sampled."""
    features: Tensor | None
    """[T, D] on the host, of the prompt tokens, or of anchor and accepted drafts."""


@dataclass(frozen=True, kw_only=True)
class CoreStep:
    """What a step gives back."""

    rows: tuple[CoreRow, ...] = ()
    num_padded: int = 0
    """Tokens that the device computed, padding included."""
    preempted: tuple[int, ...] = ()
    """Requests whose KV was taken from them. The core has dropped them."""
    failed: Mapping[int, DSparkError] = field(default_factory=dict)
    """Requests that the core has ended: a constraint that does not compile, say."""
    finished: frozenset[int] = frozenset()
    """Requests that the core has freed because they came to their end."""


class Core(Protocol):
    """One vLLM engine core in this process. Calls come one at a time, from one thread."""

    @property
    def facts(self) -> CoreFacts:
        """Fixed at load."""
        ...

    @property
    def free_blocks(self) -> int:
        """KV blocks that no request holds; cached ones that can be taken back count."""
        ...

    def check(self, request: NewRequest) -> None:
        """Refuse a constraint that it cannot compile.

        Raises:
            BadConstraint: it is malformed, or uses what vLLM's backends lack.
        """
        ...

    def add(self, request: NewRequest) -> None:
        """Take a request; it waits for its first chunk. It has passed `check`."""
        ...

    def drop(self, rids: Collection[int]) -> None:
        """Free requests; unknown ones are ignored."""
        ...

    def drop_broken(self, rid: int) -> None:
        """Free a request whose numbers are not finite, and let nobody find its KV."""
        ...

    def step(self, plan: CorePlan, limit_hit: LimitHit) -> CoreStep:
        """Run one step. Whatever it raises, the requests of the step are in an unknown state and
        must be dropped."""
        ...

    def add_computed(self, request: NewRequest, num_computed: int) -> bool:
        """As `add`, taking the first positions for computed, whatever their KV holds. Only to time
        steps; `forget_prefixes` must follow. False if the KV has no room."""
        ...

    def forget_prefixes(self) -> None:
        """Empty the prefix cache. Only while no request is here."""
        ...

    def close(self) -> None:
        """Free device and processes."""
        ...
