"""The directory behind a named Ray actor: shared, lost, found again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.directory import ACTOR_NAME, RayDirectory, end_directory
from cluster.errors import Unavailable
from tests.cluster.test_directory import member

pytestmark = [
    pytest.mark.ray,
    # Ray leaves sockets and files of its own to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def ray_() -> Iterator[Any]:
    import ray

    from deploy.local_ray import private_ray

    if ray.is_initialized():  # the served application's: directories are by name, beside its own
        yield ray
        return
    with private_ray(num_cpus=1):
        yield ray


async def test_shared_lost_and_recreated(ray_: Any) -> None:
    one = RayDirectory("test-app", ttl_s=60.0, timeout_s=30.0)
    two = RayDirectory("test-app", ttl_s=60.0, timeout_s=30.0)
    other_application = RayDirectory("test-app-2", ttl_s=60.0, timeout_s=30.0)
    await one.heartbeat(member("v0", details={"kv": 1.0}))
    await two.heartbeat(member("v1"))
    assert await one.members() == (member("v0", details={"kv": 1.0}), member("v1"))
    assert await other_application.members() == ()
    await two.leave("v0")
    assert await one.members() == (member("v1"),)

    end_directory("test-app")
    await asyncio.sleep(0.5)
    await one.heartbeat(member("v0"))  # a new, empty actor: complete after one period
    assert await two.members() == (member("v0"),)

    end_directory("test-app")
    end_directory("test-app-2")
    end_directory("test-app-2")  # there is none: fine
    await asyncio.sleep(0.5)
    for namespace in ("test-app", "test-app-2"):
        with pytest.raises(ValueError, match=ACTOR_NAME):
            ray_.get_actor(ACTOR_NAME, namespace=namespace)


async def test_calls_are_bounded(ray_: Any) -> None:
    directory = RayDirectory("test-app-3", ttl_s=60.0, timeout_s=1e-4)
    with pytest.raises(Unavailable, match="directory"):
        await directory.members()
    patient = RayDirectory("test-app-3", ttl_s=60.0, timeout_s=30.0)
    await patient.members()
    end_directory("test-app-3")
