"""Where a drafter is written to: a folder that appears whole, and replaces only what it may."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from cluster.atomic_file import write_bytes
from cluster.drafter_config import is_speculators
from cluster.errors import ConfigError, StorageFull
from cluster.tensor_file import write_tensors
from cluster.tensor_folder import read_json

_PARTS: Final = frozenset(
    {"config.json", "model.safetensors.index.json", "calibration.json", "reliability.png"}
)


def check_output(output: Path, source: Path, *, force: bool) -> None:
    """Refuse to replace anything that the user did not allow, or that is not a drafter.

    Args:
        source: the checkpoint that is about to be read.
        force: whether another drafter may be replaced.

    Raises:
        ConfigError: the folder is in use; says by what.
    """
    if output.exists() and source.exists() and output.samefile(source):
        raise ConfigError("output: is the checkpoint itself", hint="name another folder")
    if not (output.exists() or output.is_symlink()):
        return
    if not output.is_dir() or output.is_symlink():
        raise ConfigError(f"output: {output} exists and is not a folder")
    present = sorted(path.name for path in output.iterdir())
    if not present:
        return
    foreign = present if not _holds_drafter(output) else [n for n in present if not _is_ours(n)]
    if foreign:
        raise ConfigError(
            f"output: {output} holds other files ({', '.join(foreign[:3])}, ...)",
            hint="name a new folder; --force only replaces a drafter",
        )
    if not force:
        raise ConfigError(
            f"output: {output} already holds a drafter", hint="--force replaces that folder"
        )


def check_training_output(output: Path) -> None:
    """Refuse to write a drafter over anything but a drafter, before hours have gone into it."""
    if not output.exists():
        return
    if not output.is_dir() or (any(output.iterdir()) and not _holds_drafter(output)):
        raise ConfigError(
            f"output: {output} is in use by something that is not a drafter",
            hint="name a new or empty folder, or that of an earlier drafter",
        )


def _holds_drafter(folder: Path) -> bool:
    """Whether a folder holds a drafter of a format that we read, and no folders."""
    config = folder / "config.json"
    if not config.is_file() or any(path.is_dir() for path in folder.iterdir()):
        return False
    values = read_json(config)
    return is_speculators(values) or "target_layer_ids" in values


def _is_ours(name: str) -> bool:
    """Whether a file in a drafter's folder is a part of it, or was computed from it."""
    return name in _PARTS or name.endswith(".safetensors")


def publish(config: Mapping[str, Any], tensors: Mapping[str, Tensor], output: Path) -> None:
    """Write beside the output, then rename. An older folder is gone only when that succeeded.

    Raises:
        ConfigError: the folder cannot be written.
        StorageFull: no room.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
        try:
            fresh = scratch / "new"
            fresh.mkdir()
            stored = {name: t.contiguous() for name, t in tensors.items()}
            write_tensors(fresh / "model.safetensors", stored, {"format": "pt"})
            text = json.dumps(dict(config), indent=2, sort_keys=True) + "\n"
            write_bytes(fresh / "config.json", text.encode())
            _swap(fresh, output, scratch / "old")
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except StorageFull as error:
        raise StorageFull(
            f"no room to write {output}", hint="free some space or name another --output"
        ) from error
    except OSError as error:
        raise ConfigError(f"output: cannot write {output}: {error.strerror}") from error


def _swap(fresh: Path, output: Path, aside: Path) -> None:
    if not output.exists():
        fresh.rename(output)
        return
    output.rename(aside)
    try:
        fresh.rename(output)
    except OSError:
        aside.rename(output)
        raise
