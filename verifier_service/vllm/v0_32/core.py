"""`verifier_service.vllm.core.Core` over vLLM's engine core, in this process."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any, Final

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from cluster.constraints import KINDS, read_choices
from cluster.errors import BadConstraint, ConfigError, DSparkError
from verifier_service.vllm.core import (
    CoreFacts,
    CorePlan,
    CoreRow,
    CoreStep,
    LimitHit,
    NewRequest,
)
from verifier_service.vllm.v0_32.orders import Law, Ran, StepRan
from verifier_service.vllm.v0_32.scheduler import Plan, PlannedScheduler

_MAX_FORMS: Final = 256
"""Constraints remembered as judged: a request's is asked for several times, and many requests
share one."""


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
        self._adapters = {
            name: LoRARequest(lora_name=name, lora_int_id=place, lora_path=path)
            for place, (name, path) in enumerate(adapters.items(), start=1)
        }
        self._load_adapters()
        self._rids: dict[str, int] = {}
        """Of vLLM's request ids, which name an admission: a rid may come again."""
        self._ids: dict[int, str] = {}
        self._constrained: set[str] = set()
        self._num_added = 0
        self._forms: dict[tuple[str, str], StructuredOutputsParams] = {}
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
        self._form(request.constraint_kind, request.constraint)

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
        for group in manager.get_block_ids(self._ids[rid]):
            manager.evict_blocks(set(group))
        self.drop([rid])

    def step(self, plan: CorePlan, limit_hit: LimitHit) -> CoreStep:
        """See `Core.step`."""
        scheduler = self._scheduler
        scheduler.limit_hit = lambda request_id, num: limit_hit(self._rids[request_id], num)
        scheduler.plan = Plan(
            rows={self._ids[rid]: row for rid, row in plan.rows.items()},
            num_row_tokens=plan.num_row_tokens,
            prefill_budget=plan.prefill_budget,
        )
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
        preempted = tuple(self._rids[request_id] for request_id in scheduler.preempted)
        rows = tuple(self._row(request_id, item) for request_id, item in ran.requests.items())
        gone = [
            rid for rid, request_id in self._ids.items() if request_id not in scheduler.requests
        ]
        for rid in gone:
            self._forget(rid)
        return CoreStep(
            rows=rows,
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

    def _load_adapters(self) -> None:
        """All of them, now: one that does not fit must not wait for its first request.

        Raises:
            ConfigError: names the adapter.
        """
        for name, adapter in self._adapters.items():
            try:
                self._core.add_lora(adapter)
            except Exception as error:  # vLLM and the readers of files raise what they like
                reason = " ".join(str(error).split())[:600] or type(error).__name__
                raise ConfigError(f"verifier.adapters.{name}: vLLM refuses it: {reason}") from error

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
        known, _ = self._core.preprocess_add_request(
            EngineCoreRequest(
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
        )
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
            structured_outputs=self._form(request.constraint_kind, request.constraint),
        )

    def _form(self, kind: str, text: str) -> StructuredOutputsParams | None:
        """A constraint in vLLM's words, judged by the backend that will compile it.

        Raises:
            BadConstraint: it cannot.
        """
        if not kind:
            return None
        form = self._forms.get((kind, text))
        if form is None:
            params = SamplingParams(temperature=0.0, structured_outputs=_constraint(kind, text))
            try:
                params.verify(
                    self._config.model_config,
                    self._config.speculative_config,
                    self._config.structured_outputs_config,
                    getattr(self._core.structured_output_manager, "tokenizer", None),
                )
            except Exception as error:  # backends raise what they like
                reason = " ".join(str(error).split())[:600]
                raise BadConstraint(f"{kind}: {reason}") from error
            form = params.structured_outputs
            self._forms[kind, text] = form
            if len(self._forms) > _MAX_FORMS:
                self._forms.pop(next(iter(self._forms)))
        return form

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


def _constraint(kind: str, text: str) -> StructuredOutputsParams | None:
    if not kind:
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "json_schema":
        return StructuredOutputsParams(json=text)
    if kind == "choice":
        return StructuredOutputsParams(choice=list(read_choices(text)))
    if kind == "regex":
        return StructuredOutputsParams(regex=text)
    assert kind == "grammar", kind
    return StructuredOutputsParams(grammar=text)
