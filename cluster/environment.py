"""The one place that reads environment variables.

| variable | meaning |
|---|---|
| ``DSPARK_TOKEN`` | shared secret of data plane and clients; overrides ``cluster.auth_token`` |
| ``DSPARK_CACHE`` | folder of the model store, instead of the user's cache folder |
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import platformdirs

from cluster.config import MAX_THREADS, Config
from cluster.errors import ConfigError
from cluster.token import check_token


def auth_token() -> str:
    """The cluster secret, empty where none is set.

    Raises:
        ConfigError: one that no call can carry.
    """
    token = os.environ.get("DSPARK_TOKEN", "")
    try:
        check_token(token)
    except ConfigError as error:
        raise ConfigError(f"DSPARK_TOKEN: {error.message}", hint=error.hint) from error
    return token


def cache_dir() -> Path:
    """Where fetched and converted models live."""
    override = os.environ.get("DSPARK_CACHE", "")
    return Path(override).expanduser() if override else platformdirs.user_cache_path("dspark")


def with_environment(config: Config) -> Config:
    """The configuration with what the environment overrides.

    Raises:
        ConfigError: as `auth_token`.
    """
    token = auth_token()
    if not token:
        return config
    cluster = dataclasses.replace(config.cluster, auth_token=token)
    return dataclasses.replace(config, cluster=cluster)


def prepare_vllm() -> None:
    """Settings that vLLM reads when it is imported: our adapter steps the engine core itself, in
    this process, on the first model runner. Its log is kept to errors unless the user asks."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment with some variables changed, for a child process."""
    return {**os.environ, **changes}


@contextmanager
def variables(**values: str) -> Iterator[None]:
    """Set variables, for this process and its children, while the block runs."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


_SPIN_COUNT: Final = "10000"
"""Turns of the waiting loop."""


def use_threads(num_threads: int) -> int:
    """Have OpenMP, if not loaded yet, use this many threads; 0 means one per usable core.

    Returns:
        The number of threads.

    Raises:
        ConfigError: a number that OpenMP cannot have.
    """
    if not 0 <= num_threads <= MAX_THREADS:
        raise ConfigError(
            f"--threads: {num_threads} is out of range",
            hint=f"0, for all cores, to {MAX_THREADS}",
        )
    count = num_threads or len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(count)
    # libgomp spins between two parallel regions, which is what makes small ones quick; by default
    # for some 15 ms, which a verifier and a drafter on the same cores would take from each other.
    os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    return count
