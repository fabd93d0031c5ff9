"""Engines by name, loaded as a replica loads them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from cluster.config import ModelConfig, VerifierConfig
from verifier_service.engine import Engine
from verifier_service.loading import load_engine

ENGINES: Final = ("torch", "vllm")
"""Each needs the package of its name."""
PREEMPTING: Final = frozenset({"vllm"})
"""Engines that can be told to promise more KV than there is."""


def require(name: str) -> None:
    """Skip the test where the engine's package is not installed."""
    if find_spec(name) is None:
        pytest.skip(f"the {name} engine needs the package {name}, which is not installed")


def open_engine(name: str, folder: Path, *, drafter: Path | None = None, **changes: Any) -> Engine:
    """An engine; ``changes`` go to the section of the config that has the key."""
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    model = {key: value for key, value in changes.items() if key in fields}
    verifier = {key: value for key, value in changes.items() if key not in fields}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a foreign package's, about itself
        return load_engine(
            folder,
            model=ModelConfig(**{"target": str(folder), **model}),
            verifier=VerifierConfig(**{"engine": name, **verifier}),
            drafter=drafter,
        )


@contextmanager
def own_threads() -> Iterator[None]:
    """Whatever a foreign package does to torch's threads ends with the block: vLLM replaces the
    very function that sets them."""
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
