"""What runs on vLLM itself. One process, so all engines live to its end: they share its state."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from cluster.environment import prepare_vllm
from tests.frames import make_step
from tests.verifier_service.conformance.engines import open_engine, own_threads
from tests.verifier_service.conformance.targets import Target, write_tiny
from tests.verifier_service.vllm.characters import write_tokenizer
from tests.verifier_service.vllm.lora import Lora, random_lora
from verifier_service.engine import Engine

OpenEngine = Callable[..., Engine]


@pytest.fixture(scope="package", autouse=True)
def vllm() -> Iterator[None]:
    """Skip where it is missing; else import it, whatever it says about its own dependencies, and
    leave threads and environment as they were."""
    if find_spec("vllm") is None:
        pytest.skip("needs the package vllm, which is not installed")
    before = dict(os.environ)
    prepare_vllm()
    with own_threads(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.v1.engine.core  # noqa: F401
    with own_threads():
        yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="package")
def opened(vllm: None) -> Iterator[OpenEngine]:
    """A small vLLM engine of a target."""
    engines: list[Engine] = []

    def open_one(target: Target, **changes: Any) -> Engine:
        settings = {
            "max_model_len": 96,
            "max_requests": 16,
            "max_step_tokens": 64,
            "kv_tokens": 1024,
            **changes,
        }
        engines.append(open_engine("vllm", target.folder, **settings))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close()  # type: ignore[attr-defined]


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A random target of 211 tokens, most of them characters of its tokenizer."""
    target = write_tiny(tmp_path_factory.mktemp("tiny"))
    write_tokenizer(target.folder)
    return target


@pytest.fixture(scope="package")
def loras(tiny: Target) -> dict[str, Lora]:
    """Two adapters of different ranks."""
    return {
        "law": random_lora(tiny.reference.model, seed=3, rank=4),
        "poem": random_lora(tiny.reference.model, seed=4, rank=20),
    }


@pytest.fixture(scope="package")
def tiny_engine(
    opened: OpenEngine,
    tiny: Target,
    loras: dict[str, Lora],
    tmp_path_factory: pytest.TempPathFactory,
) -> Engine:
    """Shared by all tests, which take it through `engine`."""
    folder = tmp_path_factory.mktemp("adapters")
    adapters = {name: str(lora.save(folder / name)) for name, lora in loras.items()}
    return opened(tiny, drafter=tiny.drafter, adapters=adapters)


@pytest.fixture
def engine(tiny_engine: Engine) -> Iterator[Engine]:
    """The tiny target with adapters and features; left without requests, as it was found."""
    free = tiny_engine.step(make_step()).result.free_kv_blocks
    yield tiny_engine
    tiny_engine.release_all()
    assert tiny_engine.step(make_step()).result.free_kv_blocks == free


def worker_of(engine: Engine) -> Any:
    """Ours, in this process."""
    return engine._core._core.model_executor.driver_worker.worker  # type: ignore[attr-defined]
