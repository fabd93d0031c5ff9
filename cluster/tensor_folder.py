"""Reading single tensors out of a Hugging Face folder: one safetensors file, or an indexed set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cluster.errors import CheckpointError, ModelNotFound
from cluster.json_text import parse_json


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ModelNotFound: no such file.
        CheckpointError: not a JSON object.
    """
    try:
        value = parse_json(path.read_bytes())
    except OSError as error:
        raise ModelNotFound(
            f"cannot read {path}: {error.strerror}", hint="expected a Hugging Face folder"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


class TensorFolder:
    """Names, shapes and contents of the tensors in a folder: headers at once, data on demand.

    Raises:
        ModelNotFound: the folder has no safetensors file.
        CheckpointError: a file is not safetensors, or the index names a file that is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        for file in self._list_files():
            with self._open(file) as reader:
                for name in reader.keys():  # noqa: SIM118 (not a dict)
                    self.shapes[name] = tuple(reader.get_slice(name).get_shape())
                    self._files[name] = file

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def get(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor, on CPU, converted to ``dtype`` if given.

        Raises:
            CheckpointError: no such tensor; names it and the folder.
        """
        if name not in self._files:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        with self._open(self._files[name]) as reader:
            tensor: Tensor = reader.get_tensor(name)
        return tensor if dtype is None else tensor.to(dtype)

    def _list_files(self) -> list[Path]:
        single, index = (
            self.path / "model.safetensors",
            self.path / "model.safetensors.index.json",
        )
        if single.is_file():
            return [single]
        if not index.is_file():
            raise ModelNotFound(
                f"{self.path} has neither model.safetensors nor model.safetensors.index.json",
                hint="convert other weight formats to safetensors first",
            )
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: weight_map is missing or empty")
        files = [self.path / str(name) for name in sorted(set(weight_map.values()))]
        for file in files:
            if file.parent != self.path or not file.is_file():
                raise CheckpointError(f"{index}: weight_map names {file.name!r}, which is missing")
        return files

    def _open(self, file: Path) -> Any:
        try:
            return safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is not a safetensors file: {error}") from error
