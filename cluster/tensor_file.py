"""Files of tensors that are either whole or absent, see `cluster.atomic_file`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from cluster.atomic_file import write_bytes, write_whole


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file (see `write_bytes`)."""
    write_bytes(path, save(dict(tensors), dict(metadata)))


def write_torch(path: Path, value: Mapping[str, Any]) -> None:
    """Write a ``torch.save`` file (see `write_bytes`); needed for optimiser and RNG state."""
    write_whole(path, lambda part: torch.save(dict(value), part))
