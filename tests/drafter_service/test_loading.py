"""Checkpoints become models that compute the same, whatever format and dtype they come in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.errors import CheckpointError
from drafter_service.backbone import DSparkModel
from drafter_service.loading import load_drafter, save_drafter
from tests.cluster.test_drafter_config import speculators
from tests.drafters import Feed, make_engine, make_model, make_spec, write_target

HEADS: list[dict[str, Any]] = [
    {},
    {"head": "gated"},
    {"head": "rnn"},
    {"head": "none", "markov_rank": 0, "confidence_with_markov": False},
    {"draft_vocab_size": 20},
    {"has_confidence": False, "confidence_with_markov": False},
    {"sample_from_anchor": False},
    {"sliding_windows": (None, 8)},
]


def assert_same(got: DSparkModel, want: DSparkModel) -> None:
    assert got.spec == want.spec
    assert torch.equal(got.d2t, want.d2t)
    expected = want.state_dict()
    assert got.state_dict().keys() == expected.keys()
    for name, tensor in got.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("changes", HEADS)
def test_round_trip(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = make_model(make_spec(**changes))
    save_drafter(model, tmp_path / "drafter")
    loaded = load_drafter(tmp_path / "drafter", write_target(tmp_path / "target", model))
    assert_same(loaded, model)
    assert not loaded.training
    trainable = {name for name, p in loaded.named_parameters() if p.requires_grad}
    assert {"embed_tokens.weight", "lm_head.weight"}.isdisjoint(trainable)
    assert "fc.weight" in trainable


def test_bf16_is_smaller_and_close(tmp_path: Path) -> None:
    model = make_model(make_spec())
    target = write_target(tmp_path / "target", model)
    save_drafter(model, tmp_path / "drafter", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "drafter" / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}
    assert not {"embed_tokens.weight", "lm_head.weight"} & stored.keys()
    loaded = load_drafter(tmp_path / "drafter", target)
    assert torch.equal(loaded.fc.weight, model.fc.weight.bfloat16().float())
    half = load_drafter(tmp_path / "drafter", target, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half.d2t.dtype == torch.int64


def test_a_tied_targets_head_is_its_embeddings_at_d2t(tmp_path: Path) -> None:
    for size in (20, 60):
        model = make_model(make_spec(draft_vocab_size=size))
        target = write_target(tmp_path / f"target{size}", model, tied=True)
        save_drafter(model, tmp_path / f"drafter{size}")
        loaded = load_drafter(tmp_path / f"drafter{size}", target)
        assert torch.equal(loaded.lm_head.weight, model.embed_tokens.weight[model.d2t])


def test_an_untied_target_without_head_is_refused(tmp_path: Path) -> None:
    model = make_model(make_spec())
    target = write_target(tmp_path / "target", model, tied=True, tie_word_embeddings=False)
    save_drafter(model, tmp_path / "drafter")
    with pytest.raises(CheckpointError, match=r"no lm_head\.weight"):
        load_drafter(tmp_path / "drafter", target)


def test_a_target_without_embeddings_is_refused(tmp_path: Path) -> None:
    model = make_model(make_spec())
    target = write_target(tmp_path / "target", model)
    save_file({"lm_head.weight": torch.ones(60, 32)}, target / "model.safetensors")
    save_drafter(model, tmp_path / "drafter")
    with pytest.raises(CheckpointError, match=r"no embed_tokens\.weight"):
        load_drafter(tmp_path / "drafter", target)
    save_file({"model.embed_tokens.weight": torch.ones(61, 32)}, target / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has shape \(61, 32\)"):
        load_drafter(tmp_path / "drafter", target)


def test_the_checkpoints_own_embeddings_and_head_win(tmp_path: Path) -> None:
    """The reference code stores copies of both."""
    model = make_model(make_spec())
    save_drafter(model, tmp_path / "drafter")
    path = tmp_path / "drafter" / "model.safetensors"
    own = {"embed_tokens.weight": torch.rand(60, 32), "lm_head.weight": torch.rand(60, 32)}
    save_file({**load_file(path), **own}, path)
    loaded = load_drafter(tmp_path / "drafter", write_target(tmp_path / "target", model))
    assert torch.equal(loaded.embed_tokens.weight, own["embed_tokens.weight"])
    assert torch.equal(loaded.lm_head.weight, own["lm_head.weight"])


@pytest.mark.parametrize("reduced", [False, True])
def test_speculators_twin_drafts_the_same(tmp_path: Path, reduced: bool) -> None:
    """The same drafter in both formats. speculators 0.9.0 keeps ``lm_head`` (rows in the order of
    its sorted ``d2t``) only for a reduced vocabulary, and leaves embeddings to the target."""
    spec = make_spec(draft_vocab_size=20 if reduced else 60, causal_sliding_blocks=True)
    model = make_model(spec)
    model.d2t = model.d2t.sort().values
    target = write_target(tmp_path / "target", model)
    save_drafter(model, tmp_path / "deepspec")
    tensors = load_file(tmp_path / "deepspec" / "model.safetensors")
    config = speculators(draft_vocab_size=spec.draft_vocab_size)
    if reduced:
        marked = torch.zeros(60, dtype=torch.bool)
        marked[model.d2t] = True
        tensors |= {"d2t": model.d2t - torch.arange(20), "t2d": marked}
        tensors["lm_head.weight"] = model.lm_head.weight.detach().clone()
    (tmp_path / "speculators").mkdir()
    save_file(tensors, tmp_path / "speculators" / "model.safetensors")
    (tmp_path / "speculators" / "config.json").write_text(json.dumps(config))

    twins = [load_drafter(tmp_path / name, target) for name in ("deepspec", "speculators")]
    assert_same(twins[1], model)
    blocks = []
    for twin in twins:
        engine, feed = make_engine(twin), Feed(0, twin.spec)
        blocks.append(engine.run([feed.open(), feed.commit(9)], 0.0).block)
    assert blocks[0] is not None
    assert blocks[1] is not None
    assert blocks[0].ids.tolist() == blocks[1].ids.tolist()
    assert blocks[0].confidence.tolist() == blocks[1].confidence.tolist()


def test_the_format_has_room_for_one_window(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="sliding_window: one value"):
        save_drafter(make_model(make_spec(sliding_windows=(4, 8))), tmp_path)


def test_saving_again_replaces(tmp_path: Path) -> None:
    first, second = (make_model(make_spec(), seed) for seed in (0, 1))
    target = write_target(tmp_path / "target", second)
    save_drafter(first, tmp_path / "drafter")
    save_drafter(second, tmp_path / "drafter")
    assert_same(load_drafter(tmp_path / "drafter", target), second)
    assert sorted(p.name for p in (tmp_path / "drafter").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
