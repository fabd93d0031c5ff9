"""Fingerprints change with what the model is, and with nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cluster.errors import CheckpointError, ModelNotFound, ProtocolMismatch
from cluster.fingerprint import (
    check_profile_fingerprint,
    folder_fingerprint,
    profile_fingerprint,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"hidden_size": 8, "transformers_version": "5"}))
    (path / "tokenizer.json").write_text("{}")
    save_file({"w": torch.arange(16.0)}, path / "model.safetensors")
    return path


def test_copies_agree_and_writer_does_not_count(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    (copy / "config.json").write_text(
        json.dumps({"_name_or_path": "x", "transformers_version": "6", "hidden_size": 8})
    )
    (copy / "README.md").write_text("notes")
    assert folder_fingerprint(copy) == folder_fingerprint(folder)
    assert len(folder_fingerprint(folder)) == 32


@pytest.mark.parametrize("what", ["config", "tokenizer", "weights", "name"])
def test_every_part_counts(folder: Path, what: str) -> None:
    before = folder_fingerprint(folder)
    if what == "config":
        (folder / "config.json").write_text(json.dumps({"hidden_size": 9}))
    elif what == "tokenizer":
        (folder / "tokenizer.json").write_text("{ }")
    elif what == "weights":
        save_file({"w": torch.arange(16.0) + 1e-6}, folder / "model.safetensors")
    else:
        (folder / "model.safetensors").rename(folder / "other.safetensors")
    assert folder_fingerprint(folder) != before


def test_a_large_file_is_told_apart_by_samples_and_size(folder: Path) -> None:
    weights = torch.zeros(3 << 20)
    save_file({"w": weights}, folder / "model.safetensors")
    before = folder_fingerprint(folder)
    assert folder_fingerprint(folder) == before
    save_file({"w": weights + 1e-6}, folder / "model.safetensors")
    other_training = folder_fingerprint(folder)
    save_file({"w": torch.zeros(3 << 21, dtype=torch.float16)}, folder / "model.safetensors")
    other_dtype = folder_fingerprint(folder)
    assert len({before, other_training, other_dtype}) == 3


def test_no_model_is_a_typed_error(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="holds no model"):
        folder_fingerprint(tmp_path / "missing")
    (folder / "config.json").write_text("not json")
    with pytest.raises(CheckpointError, match="not JSON"):
        folder_fingerprint(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        folder_fingerprint(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound):
        folder_fingerprint(folder)


def test_a_profile_names_model_platform_and_version() -> None:
    name = profile_fingerprint("m", "torch 2 on a/b")
    check_profile_fingerprint(name, "m")
    for other in ("", "m", name.replace("m/", "n/"), name + ".1", "m/torch/0.0.0"):
        with pytest.raises(ProtocolMismatch, match="a profile of"):
            check_profile_fingerprint(other, "m")
