"""What the torch engine takes, and what it refuses by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.errors import CheckpointError, ConfigError, DSparkError, ModelNotFound, Unsupported
from tests.verifier_service.test_torch_model import Runner
from tests.verifier_service.torch_targets import (
    make_engine,
    prompt,
    reference_logits,
    save_llama,
    save_qwen3,
)
from verifier_service.torch_engine.loading import load_target, resolve_device, resolve_dtype
from verifier_service.torch_engine.spec import read_spec

CPU = torch.device("cpu")


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: t for name, t in tensors.items() if t is not None}, path)


def test_sharded_checkpoint(tmp_path: Path) -> None:
    reference = save_llama(tmp_path, shard="100KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    runner, ids = Runner(tmp_path), prompt(20)
    (logits,) = runner.logits([runner.start(ids, 20)])
    assert (logits - reference_logits(reference, ids)).abs().max() < 1e-4


def test_sliding_window_null_is_none(tmp_path: Path) -> None:
    save_qwen3(tmp_path, sliding_window=None)
    assert read_spec(tmp_path).windows == (None,) * 4


def test_missing_folder() -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        load_target(Path("/nonexistent/model"), device=CPU)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, Unsupported, "architectures"),
        ({"architectures": None}, CheckpointError, "architectures"),
        ({"hidden_act": "gelu"}, Unsupported, "hidden_act"),
        ({"quantization_config": {"quant_method": "awq"}}, Unsupported, "quantization_config"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            Unsupported,
            "rope_type",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            Unsupported,
            "partial_rotary_factor",
        ),
        ({"num_key_value_heads": 4}, CheckpointError, "num_key_value_heads"),
        ({"head_dim": 7}, CheckpointError, "head_dim"),
        ({"vocab_size": "many"}, CheckpointError, "vocab_size"),
        ({"intermediate_size": 96}, CheckpointError, "mlp.gate_proj.weight"),
        ({"num_hidden_layers": 3}, CheckpointError, r"model\.layers\.3\.\S+ has no place"),
        ({"attention_bias": True}, CheckpointError, "q_proj.bias"),
    ],
)
def test_refuses_by_name(
    changes: dict[str, Any], error: type[DSparkError], message: str, tmp_path: Path
) -> None:
    save_llama(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(error, match=message):
        load_target(tmp_path, device=CPU)


def test_refuses_unknown_layer_types(tmp_path: Path) -> None:
    save_qwen3(tmp_path)
    edit_config(tmp_path, layer_types=["full_attention"] * 3 + ["chunked_attention"])
    with pytest.raises(Unsupported, match="layer_types"):
        load_target(tmp_path, device=CPU)


def test_refuses_missing_and_surplus_tensors(tmp_path: Path) -> None:
    save_llama(tmp_path)
    edit_tensors(tmp_path, **{"model.layers.0.self_attn.q_norm.weight": torch.ones(8)})
    with pytest.raises(CheckpointError, match=r"q_norm\.weight' has no place"):
        load_target(tmp_path, device=CPU)
    edit_tensors(
        tmp_path,
        **{"model.layers.0.self_attn.q_norm.weight": None, "model.norm.weight": None},
    )
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        load_target(tmp_path, device=CPU)


def test_refuses_integer_weights(tmp_path: Path) -> None:
    save_llama(tmp_path)
    edit_tensors(tmp_path, **{"model.norm.weight": torch.ones(48, dtype=torch.int8)})
    with pytest.raises(CheckpointError, match="int8"):
        load_target(tmp_path, device=CPU)


def test_tolerates_what_transformers_does_not_read(tmp_path: Path) -> None:
    """A saved head beside a tied embedding, and rotary frequencies of old checkpoints."""
    reference = save_llama(tmp_path)
    edit_tensors(
        tmp_path,
        **{
            "lm_head.weight": torch.zeros(211, 48),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        },
    )
    runner, ids = Runner(tmp_path), prompt(9)
    (logits,) = runner.logits([runner.start(ids, 9)])
    assert (logits - reference_logits(reference, ids)).abs().max() < 1e-4


def test_bfloat16_is_close_to_fp32(tmp_path: Path) -> None:
    reference, ids = save_llama(tmp_path), prompt(20)
    runner = Runner(tmp_path, dtype="bfloat16")
    assert runner.model.dtype == torch.bfloat16
    (logits,) = runner.logits([runner.start(ids, 20)])
    want = reference_logits(reference, ids)
    assert torch.cosine_similarity(logits.float(), want, dim=-1).min() > 0.99


def test_devices_and_dtypes() -> None:
    assert resolve_device("cpu") == CPU
    assert resolve_dtype("auto", CPU, torch.bfloat16) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda"), torch.bfloat16) == torch.bfloat16
    with pytest.raises(ConfigError, match=r"model\.device"):
        resolve_device("tpu-thing")
    with pytest.raises(ConfigError, match=r"model\.device"):
        resolve_device("meta")
    with pytest.raises(ConfigError, match=r"model\.device"):
        resolve_device("cuda:99")
    with pytest.raises(ConfigError, match=r"model\.dtype"):
        resolve_dtype("int4", CPU, torch.float32)


def test_adapters_are_not_left_out_in_silence(tmp_path: Path) -> None:
    save_llama(tmp_path)
    with pytest.raises(Unsupported, match=r"verifier\.adapters") as caught:
        make_engine(tmp_path, adapters={"sql": "/a"})
    assert caught.value.hint == "verifier.engine: vllm"


def test_limits_follow_config_and_checkpoint(tmp_path: Path) -> None:
    save_llama(tmp_path)
    limits = make_engine(tmp_path, kv_tokens=1000, kv_block_tokens=32, max_requests=5).limits
    assert limits.max_model_len == 512  # the checkpoint's own, below the configured 2048
    assert (limits.kv_blocks, limits.kv_block_tokens) == (31, 32)
    assert (limits.max_requests, limits.max_step_tokens) == (5, 128)
    assert limits.vocab_size == 211
    assert len(limits.model_fingerprint) == 32
    assert make_engine(tmp_path, max_model_len=100).limits.max_model_len == 100
