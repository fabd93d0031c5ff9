"""A request of the torch engine, and the work that one step does for it."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.errors import Overloaded
from cluster.wire import Step
from verifier_service.acceptance import VerifyRow
from verifier_service.engine import EngineLimits
from verifier_service.live_request import LiveRequest, row_draft
from verifier_service.torch_engine.attention import Span
from verifier_service.torch_engine.kv import Reservation


@dataclass(kw_only=True)
class Request(LiveRequest):
    """Tokens and KV of one admitted request."""

    reservation: Reservation


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one step computes for one request: a verify row or a prompt chunk."""

    request: Request
    span: Span
    row: VerifyRow | None
    """None for a prompt chunk that is not the last: nothing to sample."""
    is_prefill: bool


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


def prefill_work(request: Request, budget: int) -> Work:
    """The next prompt chunk of at most ``budget`` tokens; the last one also samples."""
    first = request.num_computed
    end = min(first + budget, len(request.ids))
    last = end == len(request.ids)
    span = Span(
        ids=request.ids[first:end],
        first=first,
        reservation=request.reservation,
        num_logits=int(last),
    )
    row = request.verify_row() if last else None
    return Work(request=request, span=span, row=row, is_prefill=True)


def check_room(work: Work, num_tokens: int, limits: EngineLimits) -> None:
    """Refuse a row that would take the step, now at ``num_tokens``, past its limit.

    Raises:
        Overloaded: the row must wait for another step.
    """
    if num_tokens + len(work.span.ids) > limits.max_step_tokens:
        raise Overloaded(
            f"the step has {num_tokens} tokens; {len(work.span.ids)} more for request "
            f"{work.request.rid} pass its limit of {limits.max_step_tokens}"
        )
