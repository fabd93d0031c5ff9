"""Fingerprints: how two peers find out that they hold the same model without comparing bytes."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from cluster.config import LookupConfig
from cluster.drafter_spec import DrafterSource
from cluster.errors import CheckpointError, ModelNotFound, ProtocolMismatch
from cluster.json_text import parse_json

_COSMETIC: Final = frozenset({"transformers_version", "_name_or_path"})
"""Keys of ``config.json`` that say who wrote the file, not what the model is."""
_WHOLE_BYTES: Final = 8 << 20
"""Weight files up to this size are hashed whole."""
_SAMPLE_BYTES: Final = 64 << 10
_NUM_SAMPLES: Final = 64


def folder_fingerprint(path: Path) -> str:
    """32 hex digits naming the model in a Hugging Face folder, the same on every machine.

    Covers ``config.json`` (without keys that only say who wrote it), ``tokenizer.json`` and the
    safetensors files. Of a large weight file its size, its header (names, types, shapes) and 64
    evenly spaced samples are hashed: enough to tell two trainings or two dtypes apart, and
    tens of milliseconds for a model of any size. It catches mistakes, not forgeries.

    Raises:
        ModelNotFound: no such folder, or it has no ``config.json`` or no safetensors file.
        CheckpointError: ``config.json`` is not a JSON object.
    """
    config = path / "config.json"
    weights = sorted(path.glob("*.safetensors"))
    if not config.is_file() or not weights:
        raise ModelNotFound(
            f"{path} holds no model",
            hint="expected a Hugging Face folder with config.json and *.safetensors",
        )
    digest = hashlib.sha256()
    _add(digest, "config.json", _canonical_config(config))
    tokenizer = path / "tokenizer.json"
    if tokenizer.is_file():
        _add(digest, "tokenizer.json", tokenizer.read_bytes())
    for file in weights:
        _add_weights(digest, file)
    return digest.hexdigest()[:32]


def drafter_fingerprint(source: DrafterSource | None, lookup: LookupConfig) -> str:
    """Fingerprint of a drafter: of its folder, or of prompt lookup's settings; empty for none.

    Raises like `folder_fingerprint`.
    """
    if source is None:
        return ""
    if isinstance(source, Path):
        return folder_fingerprint(source)
    return f"ngram-{lookup.min_ngram}-{lookup.max_ngram}-{lookup.gamma}"


def profile_fingerprint(model: str, platform: str) -> str:
    """What a table of step times holds for: one model, on one platform, served by one version.

    Args:
        model: fingerprint of the target.
        platform: device, engine and whatever else of the replica makes steps faster or slower.
    """
    return f"{model}/{platform}/{version('dspark-serve')}"


def check_profile_fingerprint(fingerprint: str, model: str) -> None:
    """Refuse a table that was measured for another model or by another version.

    Raises:
        ProtocolMismatch: it was, or does not say.
    """
    measured_model, _, rest = fingerprint.partition("/")
    release = version("dspark-serve")
    if measured_model != model or not rest.endswith(f"/{release}"):
        raise ProtocolMismatch(
            f"a profile of {fingerprint[:80] or 'nothing'!r} for model {model!r}, "
            f"version {release}",
            hint="restart the verifier: it measures anew at start",
        )


def _canonical_config(path: Path) -> bytes:
    try:
        config = parse_json(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    kept = {key: value for key, value in config.items() if key not in _COSMETIC}
    return json.dumps(kept, sort_keys=True).encode()


def _add(digest: Any, name: str, data: bytes) -> None:
    """Hash a named piece, lengths first, so that no two lists of pieces read the same."""
    digest.update(f"{name}\0{len(data)}\0".encode())
    digest.update(data)


def _add_weights(digest: Any, path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            _add(digest, path.name, file.read())
            return
        header_bytes = min(int.from_bytes(file.read(8), "little"), _WHOLE_BYTES)
        _add(digest, f"{path.name}:{size}", file.read(header_bytes))
        body = 8 + header_bytes
        stride = (size - body - _SAMPLE_BYTES) / (_NUM_SAMPLES - 1)
        for i in range(_NUM_SAMPLES):
            file.seek(max(body + int(i * stride), body))
            digest.update(file.read(_SAMPLE_BYTES))
