"""A drafter replica over real loopback streams, between a fake verifier and a fake router."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch

from cluster import digest
from cluster.config import ClusterConfig, Config, DrafterConfig
from cluster.directory import LocalDirectory
from cluster.errors import AuthError, ProtocolMismatch, Unavailable
from cluster.streams import FrameStream, connect
from cluster.wire import (
    Blocks,
    Commit,
    Drain,
    Frame,
    Lost,
    Open,
    Ping,
    Pong,
    Refused,
    Release,
    Step,
)
from drafter_service.drafter import DrafterLimits, DraftOutcome, Work
from drafter_service.node import DrafterNode
from drafter_service.sessions import SessionCounters
from tests.drafters import (
    LANE,
    Feed,
    make_engine,
    make_model,
    make_spec,
    reference_block,
    reference_hidden,
)
from tests.frames import make_hello, make_sampling, make_step
from tests.waiting import eventually

SPEC = make_spec()


class Cluster:
    """A started node, with the streams of its peers."""

    def __init__(self, node: DrafterNode, directory: LocalDirectory) -> None:
        self.node = node
        self.directory = directory

    async def dial(self, role: str, member_id: str, **changes: Any) -> FrameStream:
        hello = make_hello(role, member_id, **changes)
        return await connect(self.node.address, hello, expect_role="drafter", timeout_s=5.0)

    async def router(self, member_id: str = LANE) -> FrameStream:
        stream = await self.dial("router", member_id)
        await eventually(lambda: member_id in self.node._routers)
        return stream

    async def verifier(self, member_id: str = "verifier-0") -> FrameStream:
        return await self.dial("verifier", member_id)


@asynccontextmanager
async def cluster(
    engine: Any = None, *, token: str = "", fingerprints: Sequence[str] = ("", ""), **settings: Any
) -> AsyncIterator[Cluster]:
    directory = LocalDirectory(ttl_s=5.0)
    config = Config(
        drafter=DrafterConfig(**settings),
        cluster=ClusterConfig(heartbeat_s=0.02, auth_token=token),
    )
    node = DrafterNode(
        member_id="drafter-0",
        engine=engine or make_engine(make_model(SPEC)),
        config=config,
        directory=directory,
        model=fingerprints[0],
        drafter=fingerprints[1],
    )
    await node.start()
    try:
        yield Cluster(node, directory)
    finally:
        await node.stop(0.0)


async def send(stream: FrameStream, *work: Work) -> None:
    for item in work:
        assert isinstance(item.frame, Frame)
        await stream.send(item.frame)


async def receive(stream: FrameStream, kind: type[Any]) -> Any:
    frame = await asyncio.wait_for(stream.recv(), 20.0)
    assert isinstance(frame, kind), frame
    return frame


def assert_drafted(blocks: Blocks, feed: Feed) -> None:
    """The frame holds the block that the reference draws for this session."""
    row = blocks.rid.tolist().index(feed.rid)
    model = make_model(SPEC)
    hidden = reference_hidden(model, torch.from_numpy(feed.rows), feed.ids[-1])
    ids, confidence = reference_block(model, hidden, feed.ids[-1])
    assert blocks.ids[row].tolist() == ids
    np.testing.assert_allclose(blocks.confidence[row], confidence, atol=1e-4)
    assert blocks.anchor[row] == len(feed.ids) - 1
    assert blocks.digest[row] == digest.of(feed.ids)
    assert blocks.epoch[row] == feed.epoch
    assert blocks.num_draft[row] == SPEC.gamma


async def test_rounds_from_open_to_release() -> None:
    async with cluster() as c:
        router, verifier = await c.router(), await c.verifier()
        feed = Feed(3, SPEC)
        await send(verifier, feed.open(), feed.commit(40, want_draft=False), feed.commit(9))
        blocks = await receive(router, Blocks)
        assert_drafted(blocks, feed)
        assert (blocks.drafter_id, blocks.has_q.tolist()) == ("drafter-0", [0])
        assert blocks.draft_s >= 0
        for num_new in (1, 4, 2):
            await send(verifier, feed.commit(num_new))
            assert_drafted(await receive(router, Blocks), feed)
        assert c.node.num_sessions == 1
        await verifier.send(Release(lane_id=LANE, rid=np.array([3, 99], np.int64)))
        await eventually(lambda: c.node.num_sessions == 0)
        assert c.node.counters.blocks == 4
        assert c.node.counters.sessions_lost == 0


async def test_one_frame_per_lane_and_batch_over_lanes_and_verifiers() -> None:
    async with cluster(batch_window_s=0.3) as c:
        routers = [await c.router(name) for name in ("router-0", "router-1")]
        verifiers = [await c.verifier(name) for name in ("verifier-0", "verifier-1")]
        feeds = [Feed(rid, SPEC) for rid in range(4)]
        for rid, feed in enumerate(feeds):
            lane = f"router-{rid % 2}"
            for item in (feed.open(), feed.commit(2 + 20 * rid)):
                assert isinstance(item.frame, Open | Commit)
                await verifiers[rid // 2].send(dataclasses.replace(item.frame, lane_id=lane))
        for lane, router in enumerate(routers):
            blocks = await receive(router, Blocks)
            assert sorted(blocks.rid.tolist()) == [lane, lane + 2]
            for feed in feeds[lane::2]:
                assert_drafted(blocks, feed)
        assert c.node.counters.batches <= 2


async def test_a_gap_is_told_to_lane_and_verifier_and_hurts_nobody_else() -> None:
    async with cluster() as c:
        router, verifier = await c.router(), await c.verifier()
        good, bad = Feed(1, SPEC), Feed(2, SPEC)
        await send(verifier, good.open(), bad.open(), good.commit(5))
        await receive(router, Blocks)
        await send(verifier, bad.commit(5, first_position=np.array([3], np.int32)))
        for stream in (router, verifier):
            lost = await receive(stream, Lost)
            assert (lost.lane_id, lost.rid.tolist(), lost.epoch.tolist()) == (LANE, [2], [0])
            assert "commit starts at 3" in lost.reason
        await send(verifier, good.commit(1))
        assert_drafted(await receive(router, Blocks), good)


async def test_old_epochs_are_dropped_and_new_ones_replace() -> None:
    async with cluster() as c:
        router, first, second = await c.router(), await c.verifier("v0"), await c.verifier("v1")
        old, new = Feed(1, SPEC), Feed(1, SPEC, epoch=1)
        await send(first, old.open(), old.commit(3))
        assert_drafted(await receive(router, Blocks), old)
        await send(second, new.open(), new.commit(2))
        assert_drafted(await receive(router, Blocks), new)
        await send(first, old.commit(1))
        await send(second, new.commit(1))
        assert_drafted(await receive(router, Blocks), new)
        await eventually(lambda: c.node._engine.counters.stale == 1)
        assert c.node.describe().details["sessions_stale"] == 1.0


async def test_blocks_of_a_lane_without_stream_are_dropped_and_counted() -> None:
    async with cluster() as c:
        verifier = await c.verifier()
        feed = Feed(1, SPEC)
        await send(verifier, feed.open(), feed.commit(3))
        await eventually(lambda: c.node.counters.blocks_dropped == 1)
        router = await c.router()
        await send(verifier, feed.commit(1))
        assert_drafted(await receive(router, Blocks), feed)
        old = c.node._routers[LANE]
        again = await c.dial("router", LANE)  # a router that dialled anew reads the new stream
        await eventually(lambda: c.node._routers[LANE] is not old)
        await router.close()
        await send(verifier, feed.commit(1))
        assert_drafted(await receive(again, Blocks), feed)


HOSTILE: list[tuple[Callable[[Feed], Work], str]] = [
    (lambda f: f.commit(2, ids=np.array([1, 60], np.int32)), "outside the vocabulary of 60"),
    (lambda f: f.commit(2, features=np.zeros((2, 31), np.float32)), "expected (2, 32)"),
    (lambda f: f.commit(2, features=np.zeros((0, 0), np.float32)), "expected (2, 32)"),
    (
        lambda f: f.commit(2, features=np.full((2, 32), 0x7F80, np.uint16)),
        "Commit.features: not finite",
    ),
    (
        lambda f: f.commit(2, features=np.full((2, 32), 0xFFC1, np.uint16)),
        "Commit.features: not finite",
    ),
]


@pytest.mark.parametrize(("hostile", "message"), HOSTILE)
async def test_a_hostile_commit_ends_its_stream_and_no_other(
    hostile: Callable[[Feed], Work], message: str
) -> None:
    async with cluster() as c:
        router, bad, good = await c.router(), await c.verifier("bad"), await c.verifier("good")
        victim, feed = Feed(1, SPEC), Feed(2, SPEC)
        await send(bad, victim.open())
        await send(good, feed.open())
        await eventually(lambda: c.node.num_sessions == 2)
        await send(bad, hostile(victim))
        refused = await receive(bad, Refused)
        assert (refused.code, refused.fatal) == ("FrameError", True)
        assert message in refused.message
        with pytest.raises(Unavailable):
            await asyncio.wait_for(bad.recv(), 5.0)
        await eventually(lambda: c.node.num_sessions == 1)
        await send(good, feed.commit(3))
        assert_drafted(await receive(router, Blocks), feed)
        assert c.node.counters.refused == 1


async def test_frames_that_a_peer_may_not_send_are_refused() -> None:
    async with cluster() as c:
        for role, frame in (
            ("router", Feed(1, SPEC).commit(1).frame),
            ("verifier", make_step()),
            ("probe", make_step()),
        ):
            assert isinstance(frame, Commit | Step)
            stream = await c.dial(role, f"{role}-9")
            await stream.send(frame)
            refused = await receive(stream, Refused)
            assert (refused.code, refused.fatal) == ("FrameError", True)
            assert f"takes no {type(frame).__name__} from a {role}" in refused.message
        assert c.node.counters.refused == 3


async def test_pings_are_answered_on_every_kind_of_stream() -> None:
    async with cluster() as c:
        for role in ("router", "verifier", "probe"):
            stream = await c.dial(role, f"{role}-1")
            await stream.send(Ping(nonce=7))
            assert (await receive(stream, Pong)).nonce == 7


async def test_a_session_that_cannot_be_opened_is_refused_and_lost() -> None:
    async with cluster() as c:
        router, verifier = await c.router(), await c.verifier()
        bad = Open(
            lane_id=LANE, rid=1, epoch=0, first_id=1, sampling=make_sampling(temperature=-1.0)
        )
        for frame, code in (
            (bad, "BadSamplingParameter"),
            (dataclasses.replace(bad, first_id=60, sampling=make_sampling()), "FrameError"),
        ):
            await verifier.send(frame)
            refused = await receive(verifier, Refused)
            assert (refused.code, refused.fatal) == (code, False)
            for stream in (verifier, router):
                assert (await receive(stream, Lost)).rid.tolist() == [1]
        feed = Feed(2, SPEC)
        await send(verifier, feed.open(), feed.commit(3))
        assert_drafted(await receive(router, Blocks), feed)


async def test_peers_with_another_model_drafter_or_token_are_refused() -> None:
    async with cluster(fingerprints=("m" * 32, "d" * 32)) as c:
        for changes in ({"model": "x" * 32}, {"drafter": "x" * 32}):
            stream = await c.dial("verifier", "v", **changes)
            refused = await receive(stream, Refused)
            assert (refused.code, refused.fatal) == ("ProtocolMismatch", True)
        stream = await c.dial("verifier", "v", model="m" * 32, drafter="d" * 32)
        await stream.send(Ping(nonce=1))
        await receive(stream, Pong)
        with pytest.raises(ProtocolMismatch):
            await c.dial("drafter", "another drafter")
    async with cluster(token="secret") as c:
        with pytest.raises(AuthError):
            await c.dial("verifier", "v")


async def test_a_closed_verifier_stream_frees_its_sessions() -> None:
    async with cluster() as c:
        gone, stays = await c.verifier("v0"), await c.verifier("v1")
        await send(gone, Feed(1, SPEC).open(), Feed(2, SPEC).open())
        await send(stays, Feed(3, SPEC).open())
        await eventually(lambda: c.node.num_sessions == 3)
        await gone.close()
        await eventually(lambda: c.node.num_sessions == 1)


async def test_idle_sessions_expire_without_any_traffic() -> None:
    engine = make_engine(make_model(SPEC), idle_session_s=0.2)
    async with cluster(engine, idle_session_s=0.2) as c:
        router, verifier = await c.router(), await c.verifier()
        await send(verifier, Feed(1, SPEC).open())
        for stream in (verifier, router):
            lost = await receive(stream, Lost)
            assert lost.rid.tolist() == [1]
            assert "idle" in lost.reason


async def test_heartbeats_tell_load_and_drain() -> None:
    async with cluster(fingerprints=("m", "d")) as c:
        router, verifier = await c.router(), await c.verifier()

        async def member() -> Any:
            found = await c.directory.members()
            return found[0] if found else None

        feed = Feed(1, SPEC)
        await send(verifier, feed.open())
        async with asyncio.timeout(10.0):
            while (m := await member()) is None or m.load != 1.0:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert (m.role, m.address, m.model, m.drafter) == ("drafter", c.node.address, "m", "d")
        assert not m.draining
        c.node.drain(3.0)
        for stream in (router, verifier):
            assert (await receive(stream, Drain)).deadline_s == 3.0
        await send(verifier, Feed(2, SPEC).open(), feed.commit(3))
        assert "draining" in (await receive(verifier, Lost)).reason
        assert "draining" in (await receive(router, Lost)).reason
        assert_drafted(await receive(router, Blocks), feed)  # what runs goes on
        async with asyncio.timeout(10.0):
            while not (await member()).draining:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    assert await c.directory.members() == ()


async def test_stop_waits_for_sessions_to_end_within_its_grace() -> None:
    async with cluster() as c:
        verifier = await c.verifier()
        await send(verifier, Feed(1, SPEC).open())
        await eventually(lambda: c.node.num_sessions == 1)
        stopping = asyncio.create_task(c.node.stop(20.0))
        await receive(verifier, Drain)
        assert not stopping.done()
        await verifier.send(Release(lane_id=LANE, rid=np.array([1], np.int64)))
        await asyncio.wait_for(stopping, 10.0)
        with pytest.raises(Unavailable):
            await asyncio.wait_for(verifier.recv(), 5.0)


class StubDrafter:
    """A drafter that keeps no model: it can be made to wait, or to raise."""

    def __init__(self) -> None:
        self.limits = DrafterLimits(gamma=2, vocab_size=60, feature_size=0)
        self.num_sessions = 0
        self.counters = SessionCounters()
        self.seen: list[Sequence[Work]] = []
        self.failures = 0
        self.go = threading.Event()
        self.go.set()

    def run(self, work: Sequence[Work], now_s: float) -> DraftOutcome:
        self.go.wait(10.0)
        if work:
            self.seen.append(work)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("a fault of ours")
        return DraftOutcome(drafted=(), block=None, num_draft=np.zeros(0, np.int32), lost=())


async def test_the_loop_outlives_a_drafter_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    stub = StubDrafter()
    stub.failures = 1
    async with cluster(stub) as c:
        verifier = await c.verifier()
        await send(verifier, Feed(1, SPEC).open())
        await eventually(lambda: c.node.counters.failed_batches == 1)
        c.node.check_health()
        await send(verifier, Feed(2, SPEC).open())
        await eventually(lambda: len(stub.seen) == 2)
    assert "a batch of 1 frames failed" in caplog.text


async def test_what_comes_while_a_batch_runs_is_the_next_batch() -> None:
    stub = StubDrafter()
    stub.go.clear()
    async with cluster(stub) as c:
        verifier = await c.verifier()
        await send(verifier, Feed(0, SPEC).open())
        await eventually(lambda: c.node._loop_task is not None and not len(c.node._queue))
        feeds = [Feed(rid, SPEC) for rid in range(1, 6)]
        no_features = np.zeros((0, 0), np.float32)  # a feature-free drafter takes none
        for feed in feeds:
            await send(verifier, feed.open(), feed.commit(2, features=no_features))
        await eventually(lambda: len(c.node._queue) == 10)
        stub.go.set()
        await eventually(lambda: len(stub.seen) == 2)
        assert [len(work) for work in stub.seen] == [1, 10]
