"""One suite, every engine: each test below runs on all that are installed.

Engines take seconds to start, so they are shared, and every test must leave its engine as it found
it: without requests, all KV free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from cluster.config import VllmConfig
from cluster.model_store import ensure_drafter
from tests.frames import make_step
from tests.verifier_service.conformance.engines import (
    ENGINES,
    PREEMPTING,
    open_engine,
    own_threads,
    require,
)
from tests.verifier_service.conformance.targets import Target, open_target, write_tiny
from verifier_service.engine import Engine

_TINY: Final[dict[str, Any]] = {
    "max_model_len": 64,
    "max_requests": 16,
    "max_step_tokens": 48,
    "kv_tokens": 512,
    "kv_block_tokens": 16,
}
"""KV for 8 whole requests of the 16. An engine may have larger blocks."""


OpenEngine = Callable[..., Engine]


@pytest.fixture(scope="package", params=ENGINES)
def engine_name(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each engine in turn."""
    require(request.param)
    with own_threads():
        yield request.param


@pytest.fixture(scope="package")
def opened(engine_name: str) -> Iterator[OpenEngine]:
    """`open_engine` for this engine. All are closed together at the end: those of vLLM share state
    of the process."""
    engines: list[Engine] = []

    def open_one(target: Target, **changes: Any) -> Engine:
        engines.append(open_engine(engine_name, target.folder, **changes))
        return engines[-1]

    yield open_one
    if engine_name == "vllm":
        for engine in engines:
            engine.close()  # type: ignore[attr-defined]


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A random target of 211 tokens and 128 positions."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="package")
def embedded(smollm2_dir: Path) -> Target:
    """The embedded target with the drafter that ships with it."""
    drafter = ensure_drafter("default", "smollm2-135m")
    assert isinstance(drafter, Path)
    return open_target(smollm2_dir, drafter)


@pytest.fixture(scope="package")
def tiny_engine(opened: OpenEngine, tiny: Target) -> Engine:
    """Shared by all tests; they take it through `engine`."""
    return opened(tiny, drafter=tiny.drafter, **_TINY)


@pytest.fixture
def engine(tiny_engine: Engine) -> Iterator[Engine]:
    """The tiny target's engine, with nothing in it: at most 64 positions a request and 48 tokens a
    step."""
    yield from _left_empty(tiny_engine)


@pytest.fixture
def overcommitted(engine_name: str, opened: OpenEngine, tiny: Target) -> Iterator[Engine]:
    """The tiny target's engine, with 4 times the KV promised that there is."""
    if engine_name not in PREEMPTING:
        pytest.skip(f"the {engine_name} engine never promises KV that it lacks")
    changes = {**_TINY, "vllm": VllmConfig(kv_overcommit=4.0)}
    yield from _left_empty(opened(tiny, drafter=tiny.drafter, **changes))


@pytest.fixture(scope="package")
def wide_engine(opened: OpenEngine, tiny: Target) -> Engine:
    """Shared by all tests; they take it through `wide`."""
    return opened(
        tiny,
        drafter=tiny.drafter,
        max_model_len=128,
        max_requests=384,
        max_step_tokens=2048,
        kv_tokens=384 * 64,
    )


@pytest.fixture
def wide(wide_engine: Engine) -> Iterator[Engine]:
    """The tiny target for hundreds of requests at a time, or for long ones."""
    yield from _left_empty(wide_engine)


@pytest.fixture(scope="package")
def embedded_engine(opened: OpenEngine, embedded: Target) -> Engine:
    """Shared by all tests; they take it through `smollm2`."""
    return opened(
        embedded,
        drafter=embedded.drafter,
        max_model_len=512,
        max_requests=32,
        max_step_tokens=512,
        kv_tokens=16384,
    )


@pytest.fixture
def smollm2(embedded_engine: Engine) -> Iterator[Engine]:
    """The embedded target's engine, with nothing in it and room for whatever a test does."""
    yield from _left_empty(embedded_engine)


def _left_empty(engine: Engine) -> Iterator[Engine]:
    """Lend an engine out, and see that it comes back as it went."""
    free = engine.step(make_step()).result.free_kv_blocks
    yield engine
    engine.release_all()
    assert engine.step(make_step()).result.free_kv_blocks == free
