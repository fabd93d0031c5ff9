"""A drafter knows its target's embeddings again, in any dtype, and no other model's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.drafter_checkpoint import load_projection
from cluster.errors import CheckpointError
from cluster.target_probe import KEY, correlation, probe, read_probe
from drafter_service.loading import load_drafter, save_drafter
from tests.drafters import make_model, make_spec, write_target


def test_a_copy_in_another_dtype_is_the_same_target() -> None:
    embeddings = torch.randn(300, 40, generator=torch.Generator().manual_seed(0))
    recorded = probe(embeddings)
    assert len(recorded) == 64
    assert len(set(recorded)) > 50  # not the same few entries again and again
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert correlation(recorded, probe(embeddings.to(dtype))) > 0.9999
    noisy = embeddings + 0.1 * torch.randn_like(embeddings)  # four bits would do that
    assert correlation(recorded, probe(noisy)) > 0.95


def test_another_training_is_another_target() -> None:
    first, second = (
        torch.randn(300, 40, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)
    )
    assert abs(correlation(probe(first), probe(second))) < 0.5
    assert correlation(probe(first), [0.0] * 64) == 0.0


@pytest.mark.parametrize("value", [[0.0] * 63, "x", [0.0] * 63 + ["y"], [0.0] * 63 + [math.nan]])
def test_a_broken_probe_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match=KEY):
        read_probe({KEY: value})
    assert read_probe({}) is None


def test_a_drafter_is_refused_beside_another_model_of_its_shape(tmp_path: Path) -> None:
    model = make_model(make_spec())
    write_target(tmp_path / "target", model)
    save_drafter(model, tmp_path / "drafter")
    load_drafter(tmp_path / "drafter", tmp_path / "target")
    weights = tmp_path / "target" / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: torch.randn_like(tensor) for name, tensor in tensors.items()}, weights)
    for load in (load_drafter, load_projection):  # the drafter's side, and the verifier's
        with pytest.raises(CheckpointError, match="another model of the same shape"):
            load(tmp_path / "drafter", tmp_path / "target")
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    del config[KEY]  # the way out that the hint names
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config))
    load_drafter(tmp_path / "drafter", tmp_path / "target")
