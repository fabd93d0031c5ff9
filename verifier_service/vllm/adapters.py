"""LoRA folders, as peft's ``save_pretrained`` writes them, judged before vLLM loads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cluster.errors import CheckpointError, ConfigError
from cluster.tensor_folder import read_json

_CONFIG: Final = "adapter_config.json"


def adapter_ranks(adapters: Mapping[str, str]) -> dict[str, int]:
    """Largest rank of each of ``verifier.adapters`` (name to folder).

    Raises:
        ConfigError: a folder that holds no LoRA adapter; names it.
    """
    return {name: _rank(name, Path(folder).expanduser()) for name, folder in adapters.items()}


def _rank(name: str, folder: Path) -> int:
    where = f"verifier.adapters.{name}: {folder}"
    if not (folder / _CONFIG).is_file():
        raise ConfigError(
            f"{where} is not a LoRA folder", hint="expected what peft's save_pretrained writes"
        )
    try:
        config = read_json(folder / _CONFIG)
    except CheckpointError as error:
        raise ConfigError(f"{where}: {error.message}") from error
    patterns = config.get("rank_pattern") or {}
    found = [config.get("r"), *(patterns.values() if isinstance(patterns, dict) else (None,))]
    ranks: list[int] = [rank for rank in found if type(rank) is int and rank > 0]
    if len(ranks) < len(found):
        raise ConfigError(
            f"{where}: ranks {found} in {_CONFIG}", hint="r and rank_pattern hold whole numbers"
        )
    return max(ranks)
