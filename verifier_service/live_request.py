"""A request inside an engine: its tokens, and what a row must say to go on with it."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster import digest
from cluster.constraints import check_constraint
from cluster.errors import (
    FrameError,
    InvalidRequest,
    PromptTooLong,
    StaleFrame,
    TokenOutOfVocabulary,
    UnknownAdapter,
    Unsupported,
)
from cluster.wire import Admission, Step
from verifier_service.acceptance import SparseQ, VerifyRow, check_draft, check_sampling
from verifier_service.engine import EngineLimits


@dataclass(kw_only=True)
class LiveRequest:
    """Tokens of one admitted request."""

    admission: Admission
    most_ids: int
    """Prompt and new tokens, at most."""
    ids: list[int]
    """Prompt and committed tokens; once prefilled, the last one is the anchor."""
    num_computed: int = 0
    """Positions whose keys and values are in the cache; once prefilled, all but the anchor's."""
    prefilled: bool = False
    digest: int = field(init=False)
    """Of the ids of computed positions, and the one after them."""
    digest_before: int | None = None
    """Of all but the last of them, if that came by itself: what a row sent ahead of it knows."""
    stop_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.digest = digest.of(self.ids[:1])
        self.stop_ids = frozenset(self.admission.stop_ids.tolist())

    @property
    def rid(self) -> int:
        return self.admission.rid

    @property
    def anchor(self) -> int:
        """Position of the last committed token."""
        return len(self.ids) - 1

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
        self.digest_before = self.digest if num_rows == 1 else None
        self.digest = digest.extend(self.digest, ids)
        return ids


def most_ids(admission: Admission, limits: EngineLimits) -> int:
    """Prompt and new tokens that the request can come to."""
    return min(admission.num_prompt + admission.max_new_tokens, limits.max_model_len)


def blocks_for(num_tokens: int, limits: EngineLimits) -> int:
    """KV blocks that ``num_tokens`` positions need."""
    return -(-num_tokens // limits.kv_block_tokens)


def check_admission(admission: Admission, limits: EngineLimits) -> None:
    """Refuse what an engine of these limits cannot serve, whatever it does at the moment.

    Raises:
        Unsupported, BadConstraint, UnknownAdapter: see `check_offered`.
        InvalidRequest: ids out of vocabulary, too long a prompt, a bad parameter.
    """
    ids, num_prompt = admission.ids, admission.num_prompt
    check_sampling(admission.sampling, limits.vocab_size)
    check_offered(admission, limits)
    if not 1 <= num_prompt <= len(ids):
        raise InvalidRequest(f"num_prompt {num_prompt} of {len(ids)} ids: no prompt")
    if int(ids.min()) < 0 or int(ids.max()) >= limits.vocab_size:
        raise TokenOutOfVocabulary(f"prompt ids outside 0..{limits.vocab_size - 1}")
    if len(ids) >= limits.max_model_len:
        raise PromptTooLong(
            f"{len(ids)} tokens leave no room for one more",
            hint=f"the limit is {limits.max_model_len} with the answer",
        )
    if len(ids) - num_prompt >= admission.max_new_tokens:
        raise InvalidRequest(f"max_new_tokens {admission.max_new_tokens}: nothing left to generate")
    # The last token's keys are never needed: nothing comes after it.
    needed = blocks_for(most_ids(admission, limits) - 1, limits)
    if needed > limits.kv_blocks:
        raise PromptTooLong(
            f"the request needs {needed} KV blocks of {limits.kv_blocks}",
            hint="lower max_new_tokens, or raise verifier.kv_tokens",
        )


def check_offered(admission: Admission, limits: EngineLimits) -> None:
    """Refuse a constraint or an adapter that the engine does not offer: neither is ever ignored.

    Raises:
        Unsupported: a kind of constraint that it lacks, or any adapter where it has none.
        BadConstraint: no engine could honour it.
        UnknownAdapter: it has others.
    """
    kind, adapter = admission.constraint_kind, admission.adapter
    check_constraint(kind, admission.constraint)
    if kind and kind not in limits.constraint_kinds:
        offered = ", ".join(limits.constraint_kinds)
        raise Unsupported(
            f"constraint {kind}: this verifier's engine cannot hold an answer to it",
            hint=f"it takes {offered}" if offered else "verifier.engine: vllm can",
        )
    if adapter and not limits.adapters:
        raise Unsupported(
            f"adapter {adapter[:64]!r}: this verifier has no adapters",
            hint="name it in verifier.adapters, with verifier.engine: vllm",
        )
    if adapter and adapter not in limits.adapters:
        raise UnknownAdapter(
            f"no adapter {adapter[:64]!r}", hint=f"one of {', '.join(limits.adapters)[:512]}"
        )


@dataclass(frozen=True, kw_only=True)
class RowDraft:
    """What a verify row asks to have judged."""

    draft_ids: tuple[int, ...]
    q: SparseQ | None


def row_draft(
    step: Step, index: int, request: LiveRequest | None, limits: EngineLimits
) -> RowDraft:
    """Drafts of row ``index`` of a step, if it goes on where its request stands.

    Drafts beyond the request's last token are left out: how many depends on the request's own
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
    prefix = int(step.digest[index])
    ahead = prefix == request.digest_before
    if anchor != request.anchor or not (ahead or prefix == request.digest):
        raise StaleFrame(
            f"request {rid} has its anchor at {request.anchor}; "
            f"the row's, at {anchor}, or its prefix is another"
        )
    draft_ids, q = _draft(step, index)
    if ahead and draft_ids:
        raise FrameError(f"request {rid}: drafts behind an anchor that was not known")
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
    return RowDraft(draft_ids=draft_ids, q=q)


def _draft(step: Step, index: int) -> tuple[tuple[int, ...], SparseQ | None]:
    first = int(step.num_draft[:index].sum())
    num = int(step.num_draft[index])
    draft_ids = tuple(step.draft_ids[first : first + num].tolist())
    if not step.has_q[index]:
        return draft_ids, None
    first = int(step.num_draft[:index][step.has_q[:index] != 0].sum())
    rows = slice(first, first + num)
    return draft_ids, SparseQ(ids=step.q_ids[rows], probs=step.q_probs[rows])
