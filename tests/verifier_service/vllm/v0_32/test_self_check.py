"""The start-up check passes on the vLLM that is supported, and names what another one lacks."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.errors import Unsupported


@pytest.fixture
def check(vllm: None) -> Any:
    from verifier_service.vllm.v0_32.self_check import check

    return check


def test_this_vllm_fits(check: Any) -> None:
    check()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("vllm.v1.core.sched.scheduler.Scheduler", "_get_local_prefix_cache_hit"),
        ("vllm.v1.core.sched.scheduler.Scheduler", "_handle_blocked_waiting_request"),
        ("vllm.v1.core.sched.scheduler.Scheduler", "_free_request"),
        ("vllm.v1.core.kv_cache_manager.KVCacheManager", "truncate_computed_blocks"),
        ("vllm.v1.core.kv_cache_manager.KVCacheManager", "evict_blocks"),
        ("vllm.v1.engine.core.EngineCore", "preprocess_add_request"),
        ("vllm.v1.engine.core.EngineCore", "add_lora"),
        ("vllm.v1.structured_output.StructuredOutputManager", "validate_tokens"),
        ("vllm.v1.structured_output.request.StructuredOutputRequest", "_grammar"),
        ("vllm.v1.worker.gpu_model_runner.GPUModelRunner", "_sample"),
    ],
)
def test_a_missing_name_is_named(
    check: Any, monkeypatch: pytest.MonkeyPatch, owner: str, name: str
) -> None:
    monkeypatch.delattr(f"{owner}.{name}")
    with pytest.raises(Unsupported, match=rf"{owner.rpartition('.')[2]}\.{name}") as caught:
        check()
    assert "0.32.0" in caught.value.hint


def test_a_missing_status_is_named(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.v1.request.RequestStatus", object)
    with pytest.raises(Unsupported, match="WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"):
        check()


def test_a_hook_in_the_air(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is still there, but nothing calls it any more."""
    from vllm.v1.core.sched.scheduler import Scheduler

    def schedule(self: Any, throttle_prefills: bool = False) -> Any:
        return self.spec_token_ids, self.num_spec_tokens, self.max_num_scheduled_tokens

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    with pytest.raises(Unsupported) as caught:
        check()
    assert "next_decode_eligible_step in" in str(caught.value)
    assert "_get_local_prefix_cache_hit in" in str(caught.value)
    assert "spec_token_ids in" not in str(caught.value)
