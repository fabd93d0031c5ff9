"""Checkpoint folders: the verifier's part, tensors checked against the configuration, d2t."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.drafter_checkpoint import load_projection, load_spec, open_checkpoint
from cluster.errors import CheckpointError, ModelNotFound
from drafter_service.loading import save_drafter
from tests.cluster.test_drafter_config import speculators
from tests.drafters import make_model, make_spec, write_target


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    save_drafter(make_model(make_spec(draft_vocab_size=20)), tmp_path / "drafter")
    return tmp_path / "drafter"


def edit(folder: Path, **changes: Tensor | None) -> None:
    """Replace tensors of a checkpoint; None removes one."""
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: t for name, t in tensors.items() if t is not None}, path)


def test_projection_is_what_the_drafter_holds(tmp_path: Path) -> None:
    model = make_model(make_spec())
    save_drafter(model, tmp_path)
    projection = load_projection(tmp_path)
    assert torch.equal(projection.fc, model.fc.weight)
    assert torch.equal(projection.hidden_norm, model.hidden_norm.weight)
    assert projection.target_layer_ids == (1, 3)
    assert (projection.hidden_size, projection.feature_width) == (32, 64)
    assert projection.rms_norm_eps == 1e-6


def test_d2t_is_absolute_in_our_extension(drafter: Path) -> None:
    assert torch.equal(open_checkpoint(drafter).d2t, make_model(make_spec(draft_vocab_size=20)).d2t)


def test_d2t_is_an_offset_in_speculators(drafter: Path) -> None:
    """`build_vocab_mappings_from_distribution` of speculators 0.9.0: target id = i + d2t[i]."""
    ids = torch.arange(5, 45, 2)
    marked = torch.zeros(60, dtype=torch.bool)
    marked[ids] = True
    (drafter / "config.json").write_text(json.dumps(speculators(draft_vocab_size=20)))
    edit(drafter, d2t=ids - torch.arange(20), t2d=marked)
    assert torch.equal(open_checkpoint(drafter).d2t, ids)
    marked[0] = True
    edit(drafter, t2d=marked)
    with pytest.raises(CheckpointError, match="'t2d' and 'd2t' disagree"):
        open_checkpoint(drafter)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (None, "no tensor 'd2t'"),
        (torch.arange(19), "'d2t' has shape"),
        (torch.arange(20) + 41, "outside the target's vocabulary of 60"),
        (torch.arange(20) - 1, "outside the target's vocabulary of 60"),
        (torch.zeros(20, dtype=torch.int64), "names a target id twice"),
        (torch.arange(20.0), "expected integers"),
    ],
)
def test_bad_d2t(drafter: Path, tensor: Tensor | None, message: str) -> None:
    edit(drafter, d2t=tensor)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(drafter)


def test_tensors_must_fit_the_configuration(drafter: Path) -> None:
    edit(drafter, **{"norm.weight": torch.ones(31)})
    with pytest.raises(CheckpointError, match=r"'norm.weight' has shape \(31,\)"):
        open_checkpoint(drafter)
    edit(drafter, **{"norm.weight": None})
    with pytest.raises(CheckpointError, match=r"no tensor 'norm.weight'"):
        open_checkpoint(drafter)
    edit(
        drafter, **{"norm.weight": torch.ones(32), "layers.0.self_attn.q_proj.bias": torch.ones(32)}
    )
    with pytest.raises(CheckpointError, match=r"'layers.0.self_attn.q_proj.bias' has no place"):
        open_checkpoint(drafter)
    edit(drafter, **{"fc.weight": torch.ones(32, 96)})
    with pytest.raises(CheckpointError, match=r"'fc.weight' has shape \(32, 96\)"):
        load_projection(drafter)


def test_another_target_is_refused_naming_both(drafter: Path, tmp_path: Path) -> None:
    model = make_model(make_spec())
    for key, value in (("vocab_size", 64), ("hidden_size", 48), ("num_hidden_layers", 7)):
        target = write_target(tmp_path / key, model, **{key: value})
        with pytest.raises(CheckpointError, match=rf"made for \d+, target .*{key} has {value}"):
            load_spec(drafter, target)
    assert load_spec(drafter, write_target(tmp_path / "right", model)).num_target_layers == 6


def test_a_multimodal_targets_text_part_counts(drafter: Path, tmp_path: Path) -> None:
    text = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 6}
    target = write_target(tmp_path / "target", make_model(make_spec()), text_config=text)
    assert load_spec(drafter, target).vocab_size == 60


def test_indexed_weights(drafter: Path) -> None:
    tensors = load_file(drafter / "model.safetensors")
    (drafter / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"neither model\.safetensors nor"):
        open_checkpoint(drafter)
    names = sorted(tensors)
    files = {name: f"model-{1 + (i % 2)}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: tensors[n] for n in names if files[n] == file}, drafter / file)
    index = drafter / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    opened = open_checkpoint(drafter)
    assert torch.equal(opened.tensors.get("fc.weight"), tensors["fc.weight"])
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../model.safetensors"}}))
    with pytest.raises(CheckpointError, match="weight_map names"):
        open_checkpoint(drafter)
    index.write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(CheckpointError, match="weight_map is missing"):
        open_checkpoint(drafter)


def test_missing_and_broken_files(drafter: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"cannot read .*config\.json"):
        load_spec(tmp_path / "missing")
    (drafter / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        load_projection(drafter)
    (drafter / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        load_spec(drafter)
    (drafter / "config.json").write_text("3")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        load_spec(drafter)


@pytest.mark.shared
def test_golden_checkpoints_are_read(shared_dir: Path) -> None:
    for kind in ("vanilla", "rnn"):
        folder = shared_dir / "golden" / kind
        opened = open_checkpoint(folder / "drafter", folder / "target")
        assert opened.spec.head == kind
        assert opened.spec.target_layer_ids == (1, 3, 4)
