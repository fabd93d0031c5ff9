"""Names of devices: equal where processes share one, different where they do not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cluster import device_identity as module
from cluster.device_identity import device_identity


def test_processes_of_one_machine_share_its_cores() -> None:
    code = "from cluster.device_identity import device_identity as d; print(d('cpu'))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert other.stdout.strip() == device_identity("cpu")
    assert len(device_identity("cpu")) == 16


def test_another_machine_or_boot_is_another_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = []
    for boot in ("one", "two"):
        (tmp_path / boot).write_text(f"{boot}\n")
        monkeypatch.setattr(module, "_BOOT_ID", tmp_path / boot)
        names.append(device_identity("cpu"))
    monkeypatch.setattr(module, "_BOOT_ID", tmp_path / "missing")
    names += [device_identity("cpu")] * 2
    assert len(set(names)) == 3
    assert names[2] == names[3]


def test_gpus_are_told_apart_by_their_own_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes see different GPUs as number 0, or one GPU as different numbers."""
    ids = {0: "GPU-a", 1: "GPU-b", 2: "GPU-a"}
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid=ids[device.index]),
    )
    first, second, again = (device_identity(f"cuda:{n}") for n in range(3))
    assert first == again
    assert len({first, second, device_identity("cpu")}) == 3
