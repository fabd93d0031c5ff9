"""A name for what a replica computes on, the same in all processes that share it.

A drafter on the verifier's own device takes from it what it computes; a router that compares these
names knows (`router.gating`).
"""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path
from typing import Final

import torch

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def device_identity(device: torch.device | str) -> str:
    """16 hex digits naming a GPU (or the part of one that the process was given), or all the CPU
    cores of a machine."""
    device = torch.device(device)
    if device.type == "cuda":
        name = f"gpu {torch.cuda.get_device_properties(device).uuid}"
    else:
        name = f"{device.type} {_machine()}"
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def _machine() -> str:
    """The same for all containers of one machine: they share its cores."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # no Linux
        return f"{uuid.getnode():x}"
