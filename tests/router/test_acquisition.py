"""Opening a lane: what a router refuses to drive."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from cluster.errors import DSparkError, FrameError, ProtocolMismatch
from router.acquisition import open_lane
from router.counters import LaneCounters
from router.drafter_book import DrafterBook
from router.lane import Lane
from router.recalibration import RecalibratorBook
from tests.frames import make_hello
from tests.router.harness import Cluster, cluster
from verifier_service.profiling import StepProfile


async def acquire(c: Cluster) -> Lane:
    """A lane over the cluster's verifier, which no router of its own has."""
    return await open_lane(
        c.verifiers["verifier-0"].describe(),
        numbers=itertools.count(),
        hello=make_hello("router", "router-9"),
        config=c.config,
        book=DrafterBook(1.0),
        counters=LaneCounters(),
        recalibrators=RecalibratorBook(enabled=True),
        on_change=lambda: None,
        on_return=lambda ticket, reason: None,
    )


async def refused(c: Cluster, kind: type[DSparkError], match: str) -> None:
    with pytest.raises(kind, match=match):
        await acquire(c)


async def test_the_profile_of_the_lease_is_the_lanes() -> None:
    costs: dict[str, Any] = {"num_tokens": (1, 64), "step_s": (0.01, 0.02), "noise": 0.07}
    async with cluster() as c:
        await c.add_verifier(profile=StepProfile(**costs))
        lane = await acquire(c)
        snapshot = lane.state.profile.snapshot()
        assert snapshot.tokens == (1, 64)
        assert snapshot.fingerprint.startswith("fake-target/")
        await lane._stream.close()


@pytest.mark.parametrize("stale", ["", "another-target/torch/0.1.0", "fake-target/torch/0.0.0"])
async def test_a_profile_of_another_model_or_version_is_refused(
    stale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verifier_service.node.fingerprint_of", lambda limits: stale)
    async with cluster() as c:
        await c.add_verifier()
        await refused(c, ProtocolMismatch, "a profile of")


async def test_a_table_that_is_none_is_refused() -> None:
    async with cluster() as c:
        await c.add_verifier(profile=StepProfile(num_tokens=(2, 1), step_s=(0.1, 0.1)))
        await refused(c, FrameError, "rising")
