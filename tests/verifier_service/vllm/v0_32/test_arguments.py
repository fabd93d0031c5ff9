"""vLLM's arguments: ours follow from our configuration, the user's pass, others are refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from cluster.config import ModelConfig, VerifierConfig, VllmConfig
from cluster.errors import ConfigError, Unsupported
from tests.verifier_service.conformance.engines import own_threads
from tests.verifier_service.conformance.targets import Target


def configured(tiny: Target, *, engine_args: dict[str, Any] | None = None, **verifier: Any) -> Any:
    """vLLM's configuration object for the tiny target."""
    from verifier_service.vllm.v0_32.arguments import engine_config

    vllm = verifier.pop("vllm", VllmConfig(engine_args=engine_args or {}))
    settings = {"engine": "vllm", "kv_tokens": 1024, "vllm": vllm, **verifier}
    with own_threads(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a foreign package's, about itself
        return engine_config(
            tiny.folder,
            model=ModelConfig(target=str(tiny.folder)),
            verifier=VerifierConfig(**settings),
            drafter=tiny.drafter,
            max_model_len=96,
        )


def test_the_users_arguments_pass(tiny: Target) -> None:
    config = configured(tiny, engine_args={"seed": 3, "gpu_memory_utilization": 0.5})
    assert config.model_config.seed == 3
    assert config.cache_config.gpu_memory_utilization == 0.5


def test_ours_follow_from_our_configuration(tiny: Target) -> None:
    config = configured(tiny, max_requests=7, max_step_tokens=48, prefix_cache=False)
    assert config.model_config.max_model_len == 96
    assert config.scheduler_config.max_num_seqs == 7
    assert config.scheduler_config.max_num_batched_tokens == 48
    assert not config.scheduler_config.async_scheduling
    assert not config.cache_config.enable_prefix_caching
    assert config.parallel_config.world_size == 1
    assert config.lora_config is None
    assert configured(tiny, prefix_cache=True).cache_config.enable_prefix_caching


@pytest.mark.parametrize(
    "name", ["model", "max_num_seqs", "speculative_config", "scheduler_cls", "max_loras"]
)
def test_what_is_ours_is_refused(tiny: Target, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine_args\.{name}: follows from") as caught:
        configured(tiny, engine_args={name: 3})
    assert "model and verifier" in caught.value.hint


def test_an_unknown_argument_is_refused(tiny: Target) -> None:
    with pytest.raises(ConfigError, match=r"engine_args\.sed: vLLM has no such argument"):
        configured(tiny, engine_args={"sed": 3})


@pytest.mark.parametrize(
    "engine_args",
    [{"seed": "three"}, {"quantization": "nonsense"}, {"seed": None, "load_format": 3}],
)
def test_a_value_that_vllm_refuses(tiny: Target, engine_args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"vLLM refuses this configuration: \w"):
        configured(tiny, engine_args=engine_args)


@pytest.mark.parametrize(("wanted", "got"), [(1, 32), (16, 32), (32, 32), (33, 64), (100, 128)])
def test_blocks_are_rounded_up(tiny: Target, wanted: int, got: int) -> None:
    """To what attention on a CPU takes; as many as hold the KV that is asked for."""
    config = configured(tiny, kv_block_tokens=wanted)
    assert config.cache_config.block_size == got
    # One more: vLLM pads with it.
    assert config.cache_config.num_gpu_blocks_override == 1024 // got + 1


def test_no_kv_tokens_is_what_memory_holds(tiny: Target) -> None:
    """Neither a number of blocks nor of bytes: vLLM measures."""
    config = configured(tiny, kv_tokens=0, engine_args={"gpu_memory_utilization": 0.02})
    assert config.cache_config.num_gpu_blocks_override is None
    assert config.cache_config.kv_cache_memory_bytes is None


def test_pipeline_parallel_is_refused(tiny: Target) -> None:
    with pytest.raises(Unsupported, match=r"pipeline_parallel: 2") as caught:
        configured(tiny, vllm=VllmConfig(pipeline_parallel=2))
    assert "tensor_parallel" in caught.value.hint


def test_one_backend_judges_and_compiles(tiny: Target) -> None:
    """vLLM's `auto` would compile a schema by the backend of whoever came first."""
    for given, backend, compact in (
        ({}, "xgrammar", True),
        ({"disable_any_whitespace": False}, "xgrammar", False),
        ({"backend": "guidance"}, "guidance", True),
        ({"backend": "outlines"}, "outlines", False),
    ):
        config = configured(tiny, engine_args={"structured_outputs_config": given})
        found = config.structured_outputs_config
        assert (found.backend, found.disable_any_whitespace) == (backend, compact)
    assert configured(tiny).structured_outputs_config.disable_any_whitespace
    for bad in ({"backend": "auto"}, "xgrammar"):
        with pytest.raises(ConfigError, match="structured_outputs_config"):
            configured(tiny, engine_args={"structured_outputs_config": bad})
