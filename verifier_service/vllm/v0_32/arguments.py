"""vLLM's engine arguments for a verifier replica: what our configuration says, in its words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, get_args

import psutil
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from cluster.autoregressive_checkpoint import load_autoregressive_spec
from cluster.config import ModelConfig, VerifierConfig
from cluster.drafter_checkpoint import checkpoint_kind, load_spec
from cluster.errors import ConfigError, Unsupported
from verifier_service.vllm.adapters import adapter_ranks
from verifier_service.vllm.v0_32 import proposer, scheduler, worker

_COMPACT: Final = ("xgrammar", "guidance")
"""Backends that can leave out whitespace of JSON."""
_LOOKUP_GAMMA: Final = 64
"""The most that ``drafter.lookup.gamma`` allows."""
_CPU_DRAFT: Final = 16
_CPU_BLOCK: Final = 32
_GPU_BLOCK: Final = 16
"""Block sizes are multiples of these."""
_OURS: Final = frozenset(
    {
        "additional_config",
        "async_scheduling",
        "block_size",
        "distributed_executor_backend",
        "dtype",
        "enable_lora",
        "enable_prefix_caching",
        "kv_cache_memory_bytes",
        "max_cpu_loras",
        "max_lora_rank",
        "max_loras",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "model",
        "num_gpu_blocks_override",
        "pipeline_parallel_size",
        "scheduler_cls",
        "speculative_config",
        "tensor_parallel_size",
        "tokenizer",
        "worker_cls",
    }
)
"""Arguments that follow from the rest of the configuration."""


def engine_config(
    target: Path,
    *,
    model: ModelConfig,
    verifier: VerifierConfig,
    drafter: Path | None,
    max_model_len: int,
) -> Any:
    """vLLM's configuration object.

    Raises:
        ConfigError: ``verifier.vllm.engine_args`` names what vLLM does not know or what is ours to
            set, or vLLM refuses the whole.
    """
    given = dict(verifier.vllm.engine_args)
    for name in sorted(given):
        if name in _OURS:
            raise ConfigError(
                f"verifier.vllm.engine_args.{name}: follows from the rest of the configuration",
                hint="see the sections model and verifier",
            )
        if name not in EngineArgs.__dataclass_fields__:
            raise ConfigError(f"verifier.vllm.engine_args.{name}: vLLM has no such argument")
    arguments = {
        **_defaults(),
        **given,
        "structured_outputs_config": _constraints(given.get("structured_outputs_config", {})),
        **_derived(target, model, verifier, max_model_len, longest_draft(drafter)),
        "additional_config": {
            worker.TARGET_KEY: str(target),
            worker.DRAFTER_KEY: "" if drafter is None else str(drafter),
        },
    }
    with refusals():
        return EngineArgs(**arguments).create_engine_config()


@contextmanager
def refusals() -> Iterator[None]:
    """Whatever vLLM says against a configuration, as an error of ours.

    Raises:
        ConfigError: in a line.
    """
    try:
        yield
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = " ".join(lines[:3]) or type(error).__name__
        raise ConfigError(f"vLLM refuses this configuration: {text[:600]}") from error


def _defaults() -> dict[str, Any]:
    """What ``engine_args`` may change. On a CPU vLLM's compiler takes a minute at each start."""
    return {"enforce_eager": True} if current_platform.is_cpu() else {}


def _constraints(given: Any) -> dict[str, Any]:
    """How constraints on answers are held; what is given counts.

    One backend judges and compiles all: vLLM's ``auto`` judges each request by a backend of its
    own, but compiles it with that of the first one, which may then ignore a part of a schema. And
    JSON comes without whitespace between its tokens: else a schema that bounds an answer would not
    bound its length, and small models do not find out of a run of blanks.

    Raises:
        ConfigError: ``auto``, or no mapping.
    """
    where = "verifier.vllm.engine_args.structured_outputs_config"
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}: not a mapping")
    backend = given.get("backend", "xgrammar")
    if backend == "auto":
        raise ConfigError(f"{where}: backend auto", hint="name one, or leave it out for xgrammar")
    return {"disable_any_whitespace": backend in _COMPACT, **given, "backend": backend}


def _derived(
    target: Path, model: ModelConfig, verifier: VerifierConfig, max_model_len: int, longest: int
) -> Mapping[str, Any]:
    if verifier.vllm.pipeline_parallel != 1:
        raise Unsupported(
            f"verifier.vllm.pipeline_parallel: {verifier.vllm.pipeline_parallel}",
            hint="features are tapped on one rank: use verifier.vllm.tensor_parallel",
        )
    parallel = verifier.vllm.tensor_parallel
    return {
        "model": str(target),
        "tokenizer": str(target),
        "skip_tokenizer_init": not (target / "tokenizer.json").is_file(),
        "dtype": _dtype(model.dtype),
        "max_model_len": max_model_len,
        "max_num_seqs": verifier.max_requests,
        "max_num_batched_tokens": max(verifier.max_step_tokens, verifier.max_requests),
        "block_size": block_tokens(verifier),
        "enable_prefix_caching": verifier.prefix_cache,
        "async_scheduling": False,
        "tensor_parallel_size": parallel,
        "distributed_executor_backend": verifier.vllm.executor if parallel > 1 else "uni",
        "scheduler_cls": scheduler.PATH,
        "worker_cls": worker.PATH,
        "speculative_config": {
            "method": "custom_class",
            "model": proposer.PATH,
            "num_speculative_tokens": longest,
        },
        **_kv(verifier),
        **_lora(verifier, longest),
    }


def longest_draft(drafter: Path | None) -> int:
    """Longest draft that is judged whole: at least the drafter's own.

    On CUDA not one token more, for vLLM captures graphs for rows of that length; without a
    checkpoint as long as prompt lookup's may be set to.
    """
    if drafter is None:
        return _LOOKUP_GAMMA
    kind = checkpoint_kind(drafter)
    load = load_autoregressive_spec if kind == "autoregressive" else load_spec
    gamma = load(drafter).gamma
    return max(gamma, _CPU_DRAFT) if current_platform.is_cpu() else gamma


def block_tokens(verifier: VerifierConfig) -> int:
    """``verifier.kv_block_tokens``, rounded up to what vLLM's attention takes."""
    step = _CPU_BLOCK if current_platform.is_cpu() else _GPU_BLOCK
    return -(-verifier.kv_block_tokens // step) * step


def _dtype(name: str) -> str:
    if name == "auto" and current_platform.is_cpu():
        return "float32"
    return name


def _kv(verifier: VerifierConfig) -> dict[str, Any]:
    """As many blocks as configured, and the one that vLLM pads with; 0: what memory holds."""
    if verifier.kv_tokens == 0:
        return {}
    blocks = verifier.kv_tokens // block_tokens(verifier) + 1
    sizes: dict[str, Any] = {"num_gpu_blocks_override": blocks}
    if current_platform.is_cpu():
        # Only a bound to check against; without it a share of all memory would be asked for.
        sizes["kv_cache_memory_bytes"] = psutil.virtual_memory().available // 2
    return sizes


def _lora(verifier: VerifierConfig, longest: int) -> dict[str, Any]:
    """Every adapter in a slot of its own, so that any mix of requests can share a step, and one
    slot that stays empty: vLLM's CPU kernels read the last one for tokens without an adapter."""
    if not verifier.adapters:
        return {}
    wanted = max(adapter_ranks(verifier.adapters).values())
    ranks = [rank for rank in sorted(get_args(MaxLoRARanks)) if rank >= wanted]
    if not ranks:
        raise ConfigError(
            f"verifier.adapters: rank {wanted} is over {max(get_args(MaxLoRARanks))}, vLLM's limit"
        )
    return {
        "enable_lora": True,
        "max_loras": len(verifier.adapters) + 1,
        "max_lora_rank": ranks[0],
        # vLLM asks for room for the longest drafts of all requests at once; steps stay as planned.
        "max_num_batched_tokens": max(
            verifier.max_step_tokens, verifier.max_requests * (longest + 1)
        ),
    }
