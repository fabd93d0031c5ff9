"""Replays of the reference implementation's figures."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.golden import TOLERANCE, main, replay

pytestmark = pytest.mark.shared


@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
@pytest.mark.parametrize("companions", [(), (1, 40, 300)])
def test_golden_replays(shared_dir: Path, kind: str, companions: tuple[int, ...]) -> None:
    differences = replay(shared_dir / "golden" / kind, companions)
    assert len({d.round for d in differences}) == 5
    assert len({d.quantity for d in differences}) == 8
    worst = max(differences, key=lambda d: d.value)
    assert worst.value <= TOLERANCE, worst


def test_a_changed_figure_fails_the_replay(
    shared_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(shared_dir / "golden" / "vanilla", tmp_path / "golden")
    path = folder / "expected.safetensors"
    path.chmod(0o644)
    expected = load_file(path)
    expected["round2.block_hidden"][3, 5] += 2 * TOLERANCE
    save_file({name: tensor.clone() for name, tensor in expected.items()}, path)
    assert main([str(folder)]) == 1
    output = capsys.readouterr().out
    assert "round 2: block_hidden differs by" in output
    assert "round 1: " not in output


def test_a_checkpoint_off_by_little_fails_the_replay(shared_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(shared_dir / "golden" / "rnn", tmp_path / "golden")
    path = folder / "drafter" / "model.safetensors"
    path.chmod(0o644)
    tensors = load_file(path)
    tensors["layers.1.self_attn.k_norm.weight"] = tensors["layers.1.self_attn.k_norm.weight"] * 1.01
    save_file(tensors, path, metadata={"format": "pt"})
    differences = replay(folder)
    assert max(d.value for d in differences if d.quantity == "block_hidden") > TOLERANCE
    assert max(d.value for d in differences if d.quantity == "projected_context") <= TOLERANCE


def test_usage_and_missing_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main([str(tmp_path)]) == 1
    assert "golden: " in capsys.readouterr().err
