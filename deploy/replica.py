"""What the replicas of every pool share: name, interface, directory, threads, models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from cluster.config import Config
from cluster.directory import RayDirectory
from cluster.drafter_spec import DrafterSource
from cluster.environment import use_threads
from cluster.model_store import ensure_drafter, ensure_model

T = TypeVar("T")


def member_id(pool: str) -> str:
    """This replica's name in the directory."""
    from ray import serve

    return f"{pool}-{serve.get_replica_context().replica_id.unique_id}"


def data_host(config: Config) -> str:
    """Interface for the data plane: the configured one, or this node's address in the cluster."""
    import ray

    address: str = ray.util.get_node_ip_address()
    return config.cluster.data_host or address


def directory(config: Config) -> RayDirectory:
    """The application's directory."""
    return RayDirectory(config.cluster.application, ttl_s=config.cluster.member_ttl_s)


def folders(config: Config) -> tuple[Path, DrafterSource | None]:
    """Target and drafter on this machine, fetched if need be."""
    target = ensure_model(config.model.target)
    return target, ensure_drafter(config.drafter.checkpoint, config.model.target)


async def in_passing(function: Callable[..., T], *args: Any) -> T:
    """Call something that loads an engine, in a thread that ends with the call.

    OpenMP gives each thread that enters a parallel region a team of its own for as long as that
    thread lives. The team of a pool's thread, which loads and then idles for ever, would count as
    competition to the engine's own: libgomp then hardly spins between regions, and every one waits
    for a sleeping thread (12 to 20% of a verify step on two cores).
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        return await asyncio.get_running_loop().run_in_executor(thread, function, *args)


def set_threads(num_threads: int) -> None:
    """Give this process ``num_threads`` for its matrix work, 0 for one per core.

    Ray sets OMP_NUM_THREADS to the CPUs that an actor *reserves*, which would leave most idle. Must
    run before torch is first imported: OpenMP reads the variable once, when it is loaded.
    """
    count = use_threads(num_threads)
    import torch

    torch.set_num_threads(count)
