"""Checkpoints of autoregressive drafters: our own format and that of speculators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.autoregressive_config import autoregressive_config, parse_autoregressive
from cluster.config import DrafterConfig
from cluster.drafter_checkpoint import checkpoint_kind, load_projection
from cluster.drafter_spec import AutoregressiveSpec
from cluster.errors import CheckpointError
from drafter_service.autoregressive.engine import AutoregressiveEngine
from drafter_service.autoregressive.loading import load_autoregressive, save_autoregressive
from drafter_service.autoregressive.model import AutoregressiveModel
from drafter_service.opening import open_drafter
from tests.autoregressive import make_model, make_spec
from tests.drafters import write_target
from verifier_service.projection import load_feature_projection


def assert_same(got: AutoregressiveModel, want: AutoregressiveModel) -> None:
    assert got.spec == want.spec
    assert torch.equal(got.d2t, want.d2t)
    expected = want.state_dict()
    assert got.state_dict().keys() == expected.keys()
    for name, tensor in got.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norms_heads": True, "norm_output": True, "norm_before_residual": True},
        {"draft_vocab_size": 20},
        {"has_confidence": False, "gamma": 1, "target_layer_ids": (5,)},
    ],
    ids=str,
)
def test_round_trip(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = make_model(make_spec(**changes))
    save_autoregressive(model, tmp_path / "drafter")
    assert checkpoint_kind(tmp_path / "drafter") == "autoregressive"
    loaded = load_autoregressive(tmp_path / "drafter", write_target(tmp_path / "target", model))
    assert_same(loaded, model)
    trainable = {name for name, p in loaded.named_parameters() if p.requires_grad}
    assert {"embed_tokens.weight", "lm_head.weight"}.isdisjoint(trainable)
    assert "fc.weight" in trainable


def test_a_file_of_speculators(tmp_path: Path) -> None:
    """Nested configuration, taps one higher, d2t as offsets, a head of its own."""
    model = make_model(make_spec(draft_vocab_size=20, has_confidence=False, norms_heads=True))
    folder = tmp_path / "drafter"
    save_autoregressive(model, folder)
    (folder / "config.json").write_text(json.dumps(speculators(model.spec)))
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"] = model.d2t - torch.arange(20)
    tensors["t2d"] = torch.zeros(60, dtype=torch.bool).index_fill(0, model.d2t, True)
    tensors["lm_head.weight"] = model.lm_head.weight.detach().clone()
    save_file(tensors, folder / "model.safetensors")
    target = write_target(tmp_path / "target", model, tied=True)
    assert_same(load_autoregressive(folder, target), model)


def speculators(spec: AutoregressiveSpec, **changes: Any) -> dict[str, Any]:
    """``config.json`` of an EAGLE-3 speculator, as that library writes it."""
    decoder = {
        "model_type": "qwen3",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "num_hidden_layers": 1,
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "vocab_size": spec.vocab_size,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": spec.gamma}],
            "verifier": {"name_or_path": "a/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": decoder,
        "draft_vocab_size": spec.draft_vocab_size,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in spec.target_layer_ids],
        "tie_word_embeddings": False,
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"fc_norm": True}, "fc_norm"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"eagle_aux_hidden_state_layer_ids": [6]}, "eagle_aux_hidden_state_layer_ids"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "eagle_aux_hidden_state_layer_ids"),
        ({"draft_vocab_size": 61}, "draft_vocab_size"),
        ({"speculators_config": {"proposal_methods": []}}, "proposal_methods"),
        ({"something_new": 1}, "something_new"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_we_cannot_do_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        parse_autoregressive(speculators(make_spec(), **changes), num_target_layers=6)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"target_layer_ids": [6]}, "target_layer_ids"),
        ({"block_size": 0}, "block_size"),
        ({"head_dim": 7}, "head_dim"),
        ({"max_position_embeddings": 5}, "max_position_embeddings"),
        ({"markov_rank": 8}, "markov_rank"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_values_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        parse_autoregressive({**autoregressive_config(make_spec()), **changes})


@pytest.mark.parametrize(
    "changes", [{"vocab_size": 61}, {"hidden_size": 40}, {"num_hidden_layers": 7}], ids=str
)
def test_another_target_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = make_model(make_spec())
    save_autoregressive(model, tmp_path / "drafter")
    target = write_target(tmp_path / "target", model, **changes)
    for load in (load_autoregressive, load_projection):
        with pytest.raises(CheckpointError, match="was made for"):
            load(tmp_path / "drafter", target)


def test_missing_and_surplus_tensors_are_refused(tmp_path: Path) -> None:
    model = make_model(make_spec())
    save_autoregressive(model, tmp_path / "drafter")
    target = write_target(tmp_path / "target", model)
    path = tmp_path / "drafter" / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "layers.1.hidden_norm.weight": torch.ones(32)}, path)
    with pytest.raises(CheckpointError, match="has no place"):
        load_autoregressive(tmp_path / "drafter", target)
    del tensors["layers.0.hidden_norm.weight"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="hidden_norm"):
        load_autoregressive(tmp_path / "drafter", target)


def test_the_verifier_ships_what_the_drafter_projects(tmp_path: Path) -> None:
    model = make_model(make_spec())
    save_autoregressive(model, tmp_path / "drafter")
    target = write_target(tmp_path / "target", model)
    projection = load_feature_projection(
        tmp_path / "drafter", target, device=torch.device("cpu"), dtype=torch.float32
    )
    raw = torch.randn(5, 64)
    with torch.no_grad():
        torch.testing.assert_close(projection(raw), model.project(raw))
    assert projection.target_layer_ids == (1, 3)
    assert projection.hidden_size == 32


def test_it_is_opened_like_any_drafter(tmp_path: Path) -> None:
    model = make_model(make_spec())
    save_autoregressive(model, tmp_path / "drafter")
    target = write_target(tmp_path / "target", model)
    drafter = open_drafter(tmp_path / "drafter", target, DrafterConfig(q_top_k=3))
    assert isinstance(drafter, AutoregressiveEngine)
    assert drafter.limits.gamma == 4
