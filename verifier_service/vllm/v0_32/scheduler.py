"""vLLM's scheduler, made to run our plans: which requests step, and with which drafts.

vLLM decides nothing but KV blocks here. A step computes the rows of its plan first, then prompt
chunks up to the plan's budget, oldest request first; decoding requests that are in no row are held
back. A request whose KV is taken (only where more KV was promised than there is) is ended, not
resumed: the lane admits it again with all that it has emitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus

from cluster.sparse import SparseQ
from verifier_service.live_request import RowDraft
from verifier_service.vllm.core import CorePlan
from verifier_service.vllm.v0_32.orders import Law, Orders

PATH: Final = f"{__name__}.PlannedScheduler"
_NEVER: Final = 1 << 60
"""A step number that does not come."""
_PADDING: Final = -1
"""Of drafts, to vLLM."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`verifier_service.vllm.core.CorePlan` by vLLM's request ids."""

    rows: Mapping[str, RowDraft] = field(default_factory=dict)
    num_row_tokens: int = 0
    prefill_budget: int = 0


def plan_of(plan: CorePlan, ids: Mapping[int, str], longest: int) -> Plan:
    """A plan with vLLM's request ids for ours.

    Drafts that buffers have no room for are left out. They need not be judged: which, depends on
    how many there are and on nothing that was drawn.
    """
    rows = {ids[rid]: _shortened(row, longest) for rid, row in plan.rows.items()}
    return Plan(
        rows=rows,
        num_row_tokens=sum(1 + len(row.draft_ids) for row in rows.values()),
        prefill_budget=plan.prefill_budget,
    )


def _shortened(row: RowDraft, longest: int) -> RowDraft:
    if len(row.draft_ids) <= longest:
        return row
    q = None if row.q is None else SparseQ(ids=row.q.ids[:longest], probs=row.q.probs[:longest])
    return RowDraft(draft_ids=row.draft_ids[:longest], q=q)


class PlannedScheduler(Scheduler):
    """See the module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.longest_draft: int = self.vllm_config.num_speculative_tokens
        # vLLM pads a request with one prompt token left by as many drafts of its own: there are
        # none. (Slots for ours are asked for step by step.)
        self.num_spec_tokens = 0
        self.plan = Plan()
        """Of the next step only."""
        self.limit_hit: Any = None
        """Request id and cached tokens found, to those that may be used."""
        self.preempted: list[str] = []
        """Of the latest step."""
        self._laws: dict[str, Law] = {}
        self._emitted: dict[str, Sequence[int]] = {}

    def expect(self, request_id: str, law: Law, emitted: Sequence[int]) -> None:
        """Know a request before it is added.

        Args:
            emitted: the end of its prompt that is output already: its grammar stands behind it.
        """
        self._laws[request_id] = law
        if emitted:
            self._emitted[request_id] = emitted

    def forget(self, request_id: str) -> None:
        """Of a request that ended, or was expected and is not added."""
        self._laws.pop(request_id, None)
        self._emitted.pop(request_id, None)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Form the step of the plan."""
        del throttle_prefills  # there is one engine, nothing to balance
        plan, self.plan = self.plan, Plan()
        for request in self.running:
            row = plan.rows.get(request.request_id)
            request.spec_token_ids = [] if row is None else list(row.draft_ids)
            held = row is None and request.num_output_tokens > 0
            request.next_decode_eligible_step = _NEVER if held else 0
        self.running.sort(key=lambda request: self._order(request, plan))
        self.max_num_scheduled_tokens = plan.num_row_tokens + plan.prefill_budget
        output = super().schedule()
        self._end_preempted()
        begun = [new.req_id for new in output.scheduled_new_reqs]
        output.dspark_orders = Orders(
            laws={request_id: self._laws.pop(request_id) for request_id in begun},
            qs={
                request_id: row.q
                for request_id, row in plan.rows.items()
                if row.q is not None and request_id in output.num_scheduled_tokens
            },
        )
        return output

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> Any:
        """Masks for every draft, with those behind the first forbidden one left open.

        vLLM expects drafts that a grammar allows, and complains of others. It is shown padding from
        the first forbidden draft on: the mask of that place stands, the draft itself stays in the
        step and is refused there with probability 0, so what lies behind it does not matter.
        """
        drafts = scheduler_output.scheduled_spec_decode_tokens
        shown = dict(drafts)
        for request_id, tokens in drafts.items():
            request = self.requests[request_id]
            if request.use_structured_output:
                allowed = self.structured_output_manager.validate_tokens(request, list(tokens))
                shown[request_id] = [*allowed, *[_PADDING] * (len(tokens) - len(allowed))]
        copy = replace(scheduler_output, scheduled_spec_decode_tokens=shown)
        return super().get_grammar_bitmask(copy)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Drafts come from plans only."""

    def _order(self, request: Request, plan: Plan) -> int:
        """Rows first: a chunk may not take their tokens. Held ones next: the last in the list are
        the first to lose their KV. The sort is stable: chunks stay oldest first."""
        if request.request_id in plan.rows:
            return 0
        return 1 if request.num_output_tokens > 0 else 2

    def _end_preempted(self) -> None:
        self.preempted = [
            request.request_id
            for request in self.requests.values()
            if request.status == RequestStatus.PREEMPTED
        ]
        if self.preempted:
            self.finish_requests(self.preempted, RequestStatus.FINISHED_ABORTED)

    def _get_local_prefix_cache_hit(self, request: Request) -> Any:
        """As far as the rows behind the cached tokens are known too."""
        blocks, num_cached, boundary, diverged = super()._get_local_prefix_cache_hit(request)
        usable = self.limit_hit(request.request_id, num_cached)
        if usable < num_cached:
            blocks = self.kv_cache_manager.truncate_computed_blocks(blocks, usable)
        return blocks, usable, boundary, diverged

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """A grammar that has just been compiled is moved to where the request stands."""
        waited = request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        ready: bool = super()._handle_blocked_waiting_request(request)
        emitted = self._emitted.get(request.request_id)
        if not (ready and waited and emitted):
            return ready
        del self._emitted[request.request_id]
        grammar = request.structured_output_request.grammar
        # Tried first: what does not fit is the caller's fault, not an error of vLLM's log.
        fits = len(grammar.validate_tokens(list(emitted))) == len(emitted)
        if fits and grammar.accept_tokens(request.request_id, list(emitted)):
            fits = not grammar.is_terminated()  # behind its end it would mask nothing
        if fits:
            return True
        self.grammar_compile_error_reqs.add(request.request_id)
        return False

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self.forget(request.request_id)
        return super()._free_request(request, delay_free_blocks)
