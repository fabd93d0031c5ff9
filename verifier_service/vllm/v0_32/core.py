"""`verifier_service.vllm.core.Core` over vLLM's engine core, in this process."""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Final

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.request import RequestStatus

from cluster.constraints import KINDS
from cluster.errors import BadConstraint, DSparkError
from verifier_service.vllm.core import (
    CoreFacts,
    CorePlan,
    CoreRow,
    CoreStep,
    LimitHit,
    NewRequest,
)
from verifier_service.vllm.v0_32.adapters import load_adapters
from verifier_service.vllm.v0_32.forms import Forms
from verifier_service.vllm.v0_32.orders import Law, Ran, StepRan
from verifier_service.vllm.v0_32.scheduler import PlannedScheduler, plan_of

_COMPILE_WAIT_S: Final = 0.05
"""Most that a step without anything else to do waits for a constraint that is being compiled."""


class InProcessCore:
    """See `Core`.

    Args:
        config: vLLM's, with our scheduler and worker in it.
        adapters: LoRA folders by name, in the order of their vLLM ids.
        platform: see `CoreFacts`.
    """

    def __init__(self, config: Any, *, adapters: dict[str, str], platform: str) -> None:
        self._config = config
        self._core = EngineCore(config, Executor.get_class(config), log_stats=False)
        scheduler = self._core.scheduler
        assert isinstance(scheduler, PlannedScheduler), type(scheduler)
        self._scheduler: PlannedScheduler = scheduler
        self._adapters = load_adapters(self._core, adapters)
        self._rids: dict[str, int] = {}
        """Of vLLM's request ids, which name an admission: a rid may come again."""
        self._ids: dict[int, str] = {}
        self._constrained: set[str] = set()
        self._num_added = 0
        self._forms = Forms(config, self._core.structured_output_manager)
        model = config.model_config
        self._facts = CoreFacts(
            vocab_size=model.get_vocab_size(),
            max_model_len=model.max_model_len,
            block_tokens=scheduler.block_size,
            num_blocks=scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1,  # one is padding
            platform=platform,
            constraint_kinds=() if model.skip_tokenizer_init else KINDS,
            prefix_cache=bool(config.cache_config.enable_prefix_caching),
        )

    @property
    def facts(self) -> CoreFacts:
        """See `Core.facts`."""
        return self._facts

    @property
    def free_blocks(self) -> int:
        """See `Core.free_blocks`."""
        free: int = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return free

    def check(self, request: NewRequest) -> None:
        """See `Core.check`."""
        if not request.constraint_kind:
            return
        if not request.stop_ids:
            raise BadConstraint(
                "a constrained answer needs a stop token to end by",
                hint="leave ignore_eos off, or name stop_token_ids",
            )
        self._forms.read(request.constraint_kind, request.constraint)

    def add(self, request: NewRequest) -> None:
        """See `Core.add`."""
        self._core.add_request(self._known(request))

    def drop(self, rids: Collection[int]) -> None:
        """See `Core.drop`."""
        here = [rid for rid in dict.fromkeys(rids) if rid in self._ids]
        ids = [self._ids[rid] for rid in here]
        for rid in here:
            self._forget(rid)
        if ids:
            self._core.abort_requests(ids)

    def drop_broken(self, rid: int) -> None:
        """See `Core.drop_broken`."""
        manager = self._scheduler.kv_cache_manager
        groups = manager.get_blocks(self._ids[rid]).blocks
        blocks = [block for group in groups for block in group if not block.is_null]
        manager.evict_blocks({block.block_id for block in blocks})
        own = [block.block_id for block in blocks if block.ref_cnt == 1]
        self._core.collective_rpc("clear_blocks", args=(own,))
        self.drop([rid])

    def step(self, plan: CorePlan, limit_hit: LimitHit) -> CoreStep:
        """See `Core.step`."""
        done = self._step(plan, limit_hit)
        idle = not (done.rows or done.failed or done.preempted)
        if idle and self._wait_for_grammar():
            done = self._step(plan, limit_hit)
        return done

    def _step(self, plan: CorePlan, limit_hit: LimitHit) -> CoreStep:
        scheduler = self._scheduler
        scheduler.limit_hit = lambda request_id, num: limit_hit(self._rids[request_id], num)
        scheduler.plan = plan_of(plan, self._ids, scheduler.longest_draft)
        scheduler.preempted = []
        try:
            outputs, _ = self._core.step()
            ran: StepRan = self._core.collective_rpc("take_ran")[0]
        except Exception:
            self._core.collective_rpc("forget_step")
            raise
        failed = {
            self._rids[output.request_id]: self._failure(output.request_id)
            for group in outputs.values()
            for output in group.outputs
            if output.finish_reason == FinishReason.ERROR
        }
        stuck = [self._rids[request_id] for request_id, item in ran.requests.items() if item.stuck]
        for rid in stuck:
            failed[rid] = BadConstraint("the constraint leaves no token that could come next")
        preempted = tuple(self._rids[request_id] for request_id in scheduler.preempted)
        core_rows = tuple(
            self._row(request_id, item)
            for request_id, item in ran.requests.items()
            if self._rids[request_id] not in failed
        )
        self.drop(stuck)
        gone = [
            rid for rid, request_id in self._ids.items() if request_id not in scheduler.requests
        ]
        for rid in gone:
            self._forget(rid)
        return CoreStep(
            rows=core_rows,
            num_padded=ran.num_padded,
            preempted=preempted,
            failed=failed,
            finished=frozenset(gone) - failed.keys() - set(preempted),
        )

    def add_computed(self, request: NewRequest, num_computed: int) -> bool:
        """See `Core.add_computed`."""
        known = self._known(request)
        known.skip_reading_prefix_cache = True
        if num_computed:
            manager = self._scheduler.kv_cache_manager
            if manager.allocate_slots(known, num_computed) is None:
                self._forget(request.rid)
                return False
            known.num_computed_tokens = num_computed
        self._core.add_request(known)
        return True

    def forget_prefixes(self) -> None:
        """See `Core.forget_prefixes`."""
        self._core.reset_prefix_cache()

    def close(self) -> None:
        """See `Core.close`."""
        self._core.shutdown()

    # --- what vLLM is told ----------------------------------------------------------------------

    def _known(self, request: NewRequest) -> Any:
        """vLLM's own request, under a new id."""
        self._num_added += 1
        request_id = f"{request.rid}-{self._num_added}"
        self._rids[request_id] = request.rid
        self._ids[request.rid] = request_id
        if request.constraint_kind:
            self._constrained.add(request_id)
        law = Law(sampling=request.sampling, num_prompt=request.num_prompt)
        self._scheduler.expect(request_id, law, list(request.ids[request.num_prompt :]))
        told = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(request.ids),
            mm_features=None,
            sampling_params=self._sampling_params(request),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=self._adapters.get(request.adapter),
            cache_salt=None,
            data_parallel_rank=None,
        )
        try:
            known, _ = self._core.preprocess_add_request(told)
        except Exception as error:  # of a backend that cannot read this tokenizer, say
            self._scheduler.forget(request_id)
            self._forget(request.rid)
            if not request.constraint_kind:
                raise
            raise BadConstraint(f"{request.constraint_kind}: {error}"[:600]) from error
        return known

    def _forget(self, rid: int) -> None:
        request_id = self._ids.pop(rid)
        del self._rids[request_id]
        self._constrained.discard(request_id)

    def _sampling_params(self, request: NewRequest) -> SamplingParams:
        """Greedy to vLLM: laws are ours. It ends the request, and keeps its grammar."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=request.max_tokens,
            ignore_eos=True,
            stop_token_ids=list(request.stop_ids),
            detokenize=False,
            structured_outputs=self._forms.read(request.constraint_kind, request.constraint),
        )

    def _wait_for_grammar(self) -> bool:
        """Has a constraint been compiled, of those that requests wait for?"""
        compiling = [
            request.structured_output_request._grammar
            for request in self._scheduler.requests.values()
            if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        ]
        futures = [grammar for grammar in compiling if isinstance(grammar, Future)]
        return bool(futures and wait(futures, _COMPILE_WAIT_S, return_when=FIRST_COMPLETED).done)

    def _failure(self, request_id: str) -> DSparkError:
        if request_id in self._constrained:
            return BadConstraint(
                "the constraint does not compile, or what was emitted before does not fit it"
            )
        return DSparkError("vLLM ended the request with an error")

    def _row(self, request_id: str, ran: Ran) -> CoreRow:
        return CoreRow(
            rid=self._rids[request_id],
            first=ran.first,
            num_tokens=ran.num_tokens,
            verdict=ran.verdict,
            broken=ran.broken,
            features=ran.features,
        )
