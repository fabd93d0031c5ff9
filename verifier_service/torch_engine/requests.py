"""A request of the torch engine, and the work that one step does for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from cluster.errors import Overloaded
from cluster.wire import Step
from verifier_service.acceptance import VerifyRow
from verifier_service.engine import EngineLimits
from verifier_service.live_request import LiveRequest, row_draft
from verifier_service.prefix_rows import BlockFiller
from verifier_service.step_report import Ran
from verifier_service.torch_engine.attention import Span
from verifier_service.torch_engine.kv import Reservation


@dataclass(kw_only=True)
class Request(LiveRequest):
    """Tokens and KV of one admitted request."""

    reservation: Reservation
    num_cached: int = 0
    """Leading positions that were found in the prefix cache; they are committed with the first
    chunk of the prompt."""
    hashes: list[bytes] = field(default_factory=list)
    """Of leading blocks (`prefix_rows.block_hashes`), as far as known."""
    num_indexed: int = 0
    """Leading blocks that can be found by their hash."""
    filler: BlockFiller | None = None
    """Where its projected rows go."""

    @property
    def has_begun(self) -> bool:
        """Whether a chunk of its prompt has been computed."""
        return self.num_computed > 0

    @property
    def num_filled(self) -> int:
        """Positions whose keys and values are there, committed or found."""
        return max(self.num_computed, self.num_cached)

    @property
    def pending_prefill(self) -> int:
        """Prompt tokens still to compute."""
        return 0 if self.prefilled else len(self.ids) - self.num_filled


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one step computes for one request: a verify row or a prompt chunk."""

    request: Request
    span: Span
    row: VerifyRow | None
    """None for a prompt chunk that is not the last: nothing to sample."""
    is_prefill: bool
    num_cached: int = 0
    """Positions before a first chunk that the prefix cache spares."""
    cached_TD: Tensor | None = None
    """Their projected rows."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return len(self.span.ids)

    @property
    def ran(self) -> Ran:
        """For the step's report."""
        return Ran(
            first=self.span.first,
            num_tokens=self.num_tokens,
            is_prefill=self.is_prefill,
            num_cached=self.num_cached,
        )


def verify_work(step: Step, index: int, request: Request | None, limits: EngineLimits) -> Work:
    """Row ``index`` of a step as work for its request.

    Raises:
        StaleFrame, FrameError: see `verifier_service.live_request.row_draft`.
    """
    draft = row_draft(step, index, request, limits)
    assert request is not None, "row_draft refuses rows without a request"
    span = Span(
        ids=(request.ids[-1], *draft.draft_ids),
        first=request.anchor,
        reservation=request.reservation,
        num_logits=len(draft.draft_ids) + 1,
    )
    row = request.verify_row(draft.draft_ids, draft.q)
    return Work(request=request, span=span, row=row, is_prefill=False)


def prefill_work(request: Request, budget: int, cached_TD: Tensor | None = None) -> Work:
    """The next prompt chunk of at most ``budget`` tokens; the last one also samples.

    Args:
        cached_TD: of a first chunk: projected rows of the positions that were found.
    """
    first = request.num_filled
    end = min(first + budget, len(request.ids))
    last = end == len(request.ids)
    span = Span(
        ids=request.ids[first:end],
        first=first,
        reservation=request.reservation,
        num_logits=int(last),
    )
    return Work(
        request=request,
        span=span,
        row=request.verify_row() if last else None,
        is_prefill=True,
        num_cached=0 if request.has_begun else request.num_cached,
        cached_TD=cached_TD,
    )


def check_room(work: Work, num_tokens: int, limits: EngineLimits) -> None:
    """Refuse a row that would take the step, now at ``num_tokens``, past its limit.

    Raises:
        Overloaded: the row must wait for another step.
    """
    if num_tokens + work.num_tokens > limits.max_step_tokens:
        raise Overloaded(
            f"the step has {num_tokens} tokens; {work.num_tokens} more for request "
            f"{work.request.rid} pass its limit of {limits.max_step_tokens}"
        )
