"""A request inside the engine, and the work that one step does for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster import digest
from cluster.errors import FrameError, Overloaded, StaleFrame
from cluster.wire import Admission, Step
from verifier_service.acceptance import SparseQ, VerifyRow, check_draft
from verifier_service.engine import EngineLimits
from verifier_service.torch_engine.attention import Span
from verifier_service.torch_engine.kv import Reservation


@dataclass(kw_only=True)
class Request:
    """Tokens and KV of one admitted request."""

    admission: Admission
    reservation: Reservation
    most_ids: int
    """Prompt and new tokens, at most."""
    ids: list[int]
    """Prompt and committed tokens; once prefilled, the last one is the anchor."""
    num_computed: int = 0
    """Positions whose keys and values are in the cache; once prefilled, all but the anchor's."""
    prefilled: bool = False
    digest: int = field(init=False)
    """Of the ids of computed positions, and the one after them."""
    stop_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.digest = digest.of(self.ids[:1])
        self.stop_ids = frozenset(self.admission.stop_ids.tolist())

    @property
    def rid(self) -> int:
        return self.admission.rid

    @property
    def remaining(self) -> int:
        """Tokens it may still emit."""
        return self.most_ids - len(self.ids)

    @property
    def pending_prefill(self) -> int:
        """Prompt tokens still to compute."""
        return 0 if self.prefilled else len(self.ids) - self.num_computed

    def verify_row(self, draft_ids: tuple[int, ...] = (), q: SparseQ | None = None) -> VerifyRow:
        """What acceptance needs to judge these drafts."""
        return VerifyRow(
            sampling=self.admission.sampling,
            ids=self.ids,
            num_prompt=self.admission.num_prompt,
            draft_ids=draft_ids,
            q=q,
        )

    def commit(self, num_rows: int) -> tuple[int, ...]:
        """Count ``num_rows`` more positions as computed. Returns the ids of the positions after."""
        first = self.num_computed + 1
        ids = tuple(self.ids[first : first + num_rows])
        assert len(ids) == num_rows, (self.rid, first, num_rows, len(self.ids))
        self.num_computed += num_rows
        self.digest = digest.extend(self.digest, ids)
        return ids


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

    Drafts beyond the request's last token are not computed: how many depends on the request's own
    length alone, so nothing that was drawn decides it, and what is emitted is the same.

    Raises:
        StaleFrame: not a decoding request of ours, or another anchor or prefix.
        FrameError: ids outside the vocabulary, a bad q, positions past the model's limit.
    """
    rid, anchor = int(step.rid[index]), int(step.anchor[index])
    if request is None:
        raise StaleFrame(f"request {rid} is not here")
    if not request.prefilled:
        raise StaleFrame(f"request {rid} is still in prefill")
    if anchor != len(request.ids) - 1 or int(step.digest[index]) != request.digest:
        raise StaleFrame(
            f"request {rid} has its anchor at {len(request.ids) - 1}; "
            f"the row's, at {anchor}, or its prefix is another"
        )
    draft_ids, q = _draft(step, index)
    check_draft(draft_ids, q, limits.vocab_size)
    if anchor + len(draft_ids) >= limits.max_model_len:
        raise FrameError(
            f"request {rid}: {len(draft_ids)} drafts at anchor {anchor} pass the limit of "
            f"{limits.max_model_len} positions"
        )
    num_draft = min(len(draft_ids), request.remaining - 1)
    if num_draft < len(draft_ids):
        draft_ids = draft_ids[:num_draft]
        q = None if q is None else SparseQ(ids=q.ids[:num_draft], probs=q.probs[:num_draft])
    span = Span(
        ids=(request.ids[-1], *draft_ids),
        first=anchor,
        reservation=request.reservation,
        num_logits=num_draft + 1,
    )
    return Work(request=request, span=span, row=request.verify_row(draft_ids, q), is_prefill=False)


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


def _draft(step: Step, index: int) -> tuple[tuple[int, ...], SparseQ | None]:
    first = int(step.num_draft[:index].sum())
    num = int(step.num_draft[index])
    draft_ids = tuple(step.draft_ids[first : first + num].tolist())
    if not step.has_q[index]:
        return draft_ids, None
    first = int(step.num_draft[:index][step.has_q[:index] != 0].sum())
    rows = slice(first, first + num)
    return draft_ids, SparseQ(ids=step.q_ids[rows], probs=step.q_probs[rows])
