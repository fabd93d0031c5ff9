"""A verifier replica over real streams: leases, steps, draft sessions, faults."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from cluster import digest
from cluster.config import Config, load_config
from cluster.directory import LocalDirectory
from cluster.errors import AuthError, ConfigError, ProtocolMismatch, Unavailable, error_for
from cluster.fingerprint import check_profile_fingerprint
from cluster.streams import FrameStream, connect
from cluster.wire import (
    Acquire,
    Blocks,
    Drain,
    Frame,
    Lease,
    Lost,
    Ping,
    Pong,
    Rebind,
    Refused,
    Release,
    Step,
    StepResult,
)
from tests.fakes import (
    FakeDrafter,
    FakeEngine,
    Row,
    greedy_continuation,
    make_admission,
    make_hello,
    make_step,
)
from tests.waiting import eventually
from verifier_service.draft_links import DraftLinks, Update
from verifier_service.engine import StepOutcome
from verifier_service.node import VerifierNode
from verifier_service.profiling import StepProfile

PROFILE = StepProfile(num_tokens=(1, 64), step_s=(0.01, 0.02))
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def make_config(**verifier: Any) -> Config:
    return load_config(
        {
            "verifier": {"lease_ttl_s": 5.0} | verifier,
            "cluster": {"heartbeat_s": 0.02, "connect_timeout_s": 2.0},
        }
    )


@dataclass
class Replica:
    node: VerifierNode
    engine: FakeEngine
    directory: LocalDirectory


@contextlib.asynccontextmanager
async def make_replica(
    engine: FakeEngine | None = None, config: Config | None = None, **changes: Any
) -> AsyncIterator[Replica]:
    engine = engine or FakeEngine()
    directory = LocalDirectory(60.0)
    node = VerifierNode(
        member_id="verifier-0",
        engine=engine,
        config=config or make_config(),
        directory=directory,
        **({"profile": PROFILE} | changes),
    )
    await node.start()
    yield Replica(node, engine, directory)
    await node.stop()
    await node.stop()
    left = {t.get_name() for t in asyncio.all_tasks() if t is not asyncio.current_task()}
    assert not left & {"steps", "lease expiry", "heartbeat"}, left
    assert not [t for t in threading.enumerate() if t.name.startswith("engine")]


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    async with make_replica() as replica:
        yield replica


@pytest.fixture
async def drafter() -> AsyncIterator[FakeDrafter]:
    drafter = FakeDrafter()
    await drafter.start()
    yield drafter
    await drafter.stop()


@dataclass
class Router:
    """The far side of a lane, by hand: keeps the committed ids and checks every result."""

    stream: FrameStream
    lane_id: str
    lane_epoch: int = 0
    step_id: int = 0
    ids: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, int] = field(default_factory=dict)

    async def acquire(self) -> Lease:
        await self.stream.send(Acquire(lane_id=self.lane_id))
        lease: Lease = await self.recv(Lease)
        self.lane_epoch = lease.lane_epoch
        return lease

    async def recv(self, kind: type[Any]) -> Any:
        async with asyncio.timeout(10):
            frame = await self.stream.recv()
        assert isinstance(frame, kind), frame
        return frame

    async def send(self, rows: Sequence[Row] = (), **changes: Any) -> Step:
        self.step_id += 1
        step = make_step(
            rows, **({"lane_epoch": self.lane_epoch, "step_id": self.step_id} | changes)
        )
        for admission in step.admissions:
            self.ids.setdefault(admission.rid, admission.ids.tolist())
        await self.stream.send(step)
        return step

    async def step(self, rows: Sequence[Row] = (), **changes: Any) -> StepResult:
        step = await self.send(rows, **changes)
        result: StepResult = await self.recv(StepResult)
        assert (result.step_id, result.lane_epoch) == (step.step_id, self.lane_epoch)
        start = 0
        for i, rid in enumerate(result.rid.tolist()):
            end = start + int(result.num_emitted[i])
            self.ids[rid] += result.token_ids[start:end].tolist()
            assert result.anchor[i] == len(self.ids[rid]) - 1
            assert int(result.digest[i]) == digest.of(self.ids[rid])
            if result.finish[i]:
                self.finished[rid] = int(result.finish[i])
            start = end
        return result

    def row(self, rid: int, draft_ids: Sequence[int] = (), *, want_draft: bool = False) -> Row:
        return Row(rid=rid, ids=self.ids[rid], draft_ids=draft_ids, want_draft=want_draft)


@contextlib.asynccontextmanager
async def make_router(
    replica: Replica, member_id: str = "router-0", *, acquire: bool = True, **changes: Any
) -> AsyncIterator[Router]:
    hello = make_hello("router", member_id, **changes)
    stream = await connect(replica.node.address, hello, expect_role="verifier", timeout_s=5.0)
    router = Router(stream, member_id)
    if acquire:
        await router.acquire()
    yield router
    await stream.close()


async def read_blocks(router_stream: FrameStream) -> Blocks:
    async with asyncio.timeout(10):
        frame = await router_stream.recv()
    assert isinstance(frame, Blocks), frame
    return frame


# --- leases ------------------------------------------------------------------------------------


async def test_the_lease_tells_what_the_replica_can_do(replica: Replica) -> None:
    async with make_router(replica, acquire=False) as router:
        lease = await router.acquire()
        limits = replica.engine.limits
        assert lease.lane_epoch > 0
        assert lease.ttl_s == 5.0
        for name in ("max_model_len", "vocab_size", "max_requests", "max_step_tokens", "kv_blocks"):
            assert getattr(lease, name) == getattr(limits, name)
        assert lease.profile_tokens.tolist() == [1, 64]
        assert np.allclose(lease.profile_step_s, [0.01, 0.02])


async def test_the_profile_is_measured_at_start_if_not_given() -> None:
    engine = FakeEngine(max_step_tokens=8, delay_s=lambda tokens: 0.001 * tokens)
    async with make_replica(engine, profile=None) as replica, make_router(replica) as router:
        lease = await router.acquire()
        assert set(lease.profile_tokens.tolist()) >= {1, 2, 3, 4, 6, 8}
        assert np.allclose(lease.profile_step_s, 0.001 * lease.profile_tokens)
        assert lease.profile_row_s == pytest.approx(0, abs=1e-9)
        check_profile_fingerprint(lease.profile_fingerprint, engine.limits.model_fingerprint)


async def test_a_profile_of_another_engine_is_refused_at_start() -> None:
    node = VerifierNode(
        member_id="verifier-0",
        engine=FakeEngine(),
        config=make_config(),
        directory=LocalDirectory(60.0),
        profile=dataclasses.replace(PROFILE, fingerprint="other/engine/1"),
    )
    with pytest.raises(ConfigError, match="other/engine/1"):
        await node.start()
    await node.stop()


async def test_one_lane_at_a_time(replica: Replica) -> None:
    async with (
        make_router(replica) as first,
        make_router(replica, "router-1", acquire=False) as second,
    ):
        await second.stream.send(Acquire(lane_id="router-1"))
        refusal = await second.recv(Refused)
        assert (refusal.code, refusal.fatal) == ("LeaseError", False)
        assert "router-0" in refusal.message
        assert "retry in" in refusal.message
        await second.send([], lane_epoch=first.lane_epoch)  # a stolen epoch does not help
        assert (await second.recv(Refused)).code == "LeaseError"
        await first.step()  # the holder is not disturbed
        await first.stream.close()
        await eventually(lambda: replica.node.describe().lane_owner == "")
        lease = await second.acquire()
        assert lease.lane_epoch > first.lane_epoch


async def test_a_lane_is_named_after_its_router(replica: Replica) -> None:
    async with make_router(replica, acquire=False) as router:
        await router.stream.send(Acquire(lane_id="router-7"))
        assert (await router.recv(Refused)).code == "LeaseError"


async def test_stale_epochs_are_refused_and_run_nothing(replica: Replica) -> None:
    async with make_router(replica) as router:
        old = router.lane_epoch
        await router.acquire()
        await router.send(lane_epoch=old, admissions=(make_admission(1, PROMPT),))
        assert (await router.recv(Refused)).code == "LeaseError"
        await router.step()
        assert replica.engine.num_steps == 1
        assert replica.engine.live == frozenset()


async def test_losing_the_holder_frees_everything(replica: Replica, drafter: FakeDrafter) -> None:
    async with make_router(replica) as router:
        await router.step(admissions=(admit(1, drafter), make_admission(2, PROMPT)))
        assert replica.engine.live == {1, 2}
        await eventually(lambda: len(drafter.sessions) == 1)
        assert replica.node.cache.num_bytes > 0
    await eventually(lambda: not replica.engine.live and not drafter.sessions)
    assert replica.node.cache.num_bytes == 0
    assert replica.node.describe().lane_owner == ""
    assert replica.node.describe().load == 0


async def test_a_silent_holder_loses_the_lease_and_pings_keep_it() -> None:
    async with (
        make_replica(config=make_config(lease_ttl_s=0.3)) as replica,
        make_router(replica) as router,
    ):
        await router.step(admissions=(make_admission(1, PROMPT),))
        for nonce in range(10):
            await asyncio.sleep(0.06)
            await router.stream.send(Ping(nonce=nonce))
            assert await router.recv(Pong) == Pong(nonce=nonce)
        assert replica.engine.live == {1}
        refusal = await router.recv(Refused)
        assert (refusal.code, refusal.fatal) == ("LeaseError", True)
        assert replica.engine.live == frozenset()
        with pytest.raises(Unavailable):
            await router.stream.recv()


async def test_a_holder_waiting_for_a_long_step_is_not_silent() -> None:
    engine = FakeEngine(delay_s=lambda tokens: 0.5)
    async with (
        make_replica(engine, make_config(lease_ttl_s=0.15)) as replica,
        make_router(replica) as router,
    ):
        await router.step(admissions=(make_admission(1, PROMPT),))
        assert len(router.ids[1]) == len(PROMPT) + 1


async def test_a_router_that_comes_back_starts_clean(replica: Replica) -> None:
    async with make_router(replica) as first:
        await first.step(admissions=(make_admission(1, PROMPT),))
        async with make_router(replica) as again:  # the same member on a new stream
            refusal = await first.recv(Refused)
            assert (refusal.code, refusal.fatal) == ("LeaseError", True)
            assert again.lane_epoch > first.lane_epoch
            assert replica.engine.live == frozenset()
            await first.stream.close()
            await again.step(admissions=(make_admission(1, PROMPT),))
            assert again.ids[1][len(PROMPT) :] == greedy_continuation(PROMPT, 1)


async def test_two_routers_take_turns_without_mixing(replica: Replica) -> None:
    """The same request ids under two leases: nothing of the first reaches the second."""
    for turn in range(4):
        async with make_router(replica, f"router-{turn % 2}", acquire=False) as router:
            await eventually(lambda: replica.node.describe().lane_owner == "")
            await router.acquire()
            await router.step(admissions=(make_admission(1, [turn, 8]),))
            await router.step([router.row(1)])
            await router.send([router.row(1)])  # leave in the middle of a step
            assert router.ids[1] == [turn, 8, *greedy_continuation([turn, 8], 2)]


# --- steps -------------------------------------------------------------------------------------


async def test_the_text_is_the_greedy_one_whatever_is_drafted(replica: Replica) -> None:
    async with make_router(replica) as router:
        prompts = {rid: [rid, *PROMPT] for rid in range(1, 5)}
        await router.step(
            admissions=tuple(
                make_admission(rid, ids, max_new_tokens=20) for rid, ids in prompts.items()
            ),
            prefill_budget=20,
        )
        while len(router.finished) < 4:
            rows = []
            for rid in prompts:
                if rid in router.finished or len(router.ids[rid]) == len(prompts[rid]):
                    continue  # still prefilling, in chunks
                draft = greedy_continuation(router.ids[rid], rid)
                draft[-1] = (draft[-1] + 1) % 97
                rows.append(router.row(rid, draft))
            await router.step(rows, prefill_budget=7)
        for rid, prompt in prompts.items():
            assert router.ids[rid] == prompt + greedy_continuation(prompt, 20)
        assert replica.engine.free_kv_blocks == replica.engine.limits.kv_blocks


async def test_one_step_may_wait_and_no_more() -> None:
    running, release = threading.Event(), threading.Event()

    def hold(_: float) -> None:
        running.set()
        release.wait(10)

    engine = FakeEngine(delay_s=lambda tokens: 1.0, sleep=hold)
    async with make_replica(engine) as replica, make_router(replica) as router:
        await router.send()
        await asyncio.to_thread(running.wait, 10)
        await router.send()
        await router.send()
        refusal = await router.recv(Refused)
        assert (refusal.code, refusal.fatal) == ("Overloaded", False)
        assert "step 3" in refusal.message
        release.set()
        assert [(await router.recv(StepResult)).step_id for _ in range(2)] == [1, 2]


async def test_the_next_step_may_come_while_a_result_is_on_its_way(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that has the first result may hand over a third step, though the verifier has not
    got round to the second."""
    send, answered = FrameStream.send, asyncio.Event()

    async def slow(stream: FrameStream, frame: Frame) -> None:
        await send(stream, frame)
        if isinstance(frame, StepResult) and not answered.is_set():
            answered.set()
            await asyncio.sleep(0.1)  # the step loop is held up behind the first result

    monkeypatch.setattr(FrameStream, "send", slow)
    async with make_router(replica) as router:
        await router.send()
        await router.send()
        await answered.wait()
        await router.send()
        assert [(await router.recv(StepResult)).step_id for _ in range(3)] == [1, 2, 3]


async def test_bad_admissions_and_rows_fail_alone(replica: Replica) -> None:
    async with make_router(replica) as router:
        good = make_admission(1, PROMPT)
        result = await router.step(
            admissions=(
                good,
                make_admission(2, [1, 200]),
                make_admission(3, [1] * 256),
                make_admission(4, []),
                dataclasses.replace(good, rid=5, max_new_tokens=0),
            )
        )
        assert result.rid.tolist() == [1]
        codes = {failure.rid: failure.code for failure in result.failures}
        assert codes == {
            2: "TokenOutOfVocabulary",
            3: "PromptTooLong",
            4: "InvalidRequest",
            5: "InvalidRequest",
        }
        assert replica.engine.live == {1}
        assert replica.node.describe().load == 1
        repeated = await router.step([router.row(1)], admissions=(make_admission(9, [1]), good))
        assert {f.rid: f.code for f in repeated.failures} == {1: "FrameError"}
        assert repeated.rid.tolist() == [1, 9]  # the live one went on


async def test_stale_rows_change_nothing(replica: Replica) -> None:
    async with make_router(replica) as router:
        await router.step(admissions=(make_admission(1, PROMPT), make_admission(2, PROMPT[::-1])))
        wrong_prefix = Row(rid=1, ids=[0, *router.ids[1][1:]])
        unknown = Row(rid=77, ids=[1])
        result = await router.step([wrong_prefix, router.row(2), unknown])
        assert result.rid.tolist() == [2]
        assert {f.rid: f.code for f in result.failures} == {1: "StaleFrame", 77: "StaleFrame"}
        await router.step([router.row(1)])
        assert router.ids[1] == PROMPT + greedy_continuation(PROMPT, 2)


async def test_an_engine_crash_fails_its_requests_and_the_replica_goes_on(
    replica: Replica, drafter: FakeDrafter, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_router(replica) as router:
        await router.step(
            admissions=(admit(1, drafter), make_admission(2, PROMPT), make_admission(3, PROMPT))
        )
        replica.engine.fail_next = RuntimeError("device lost")
        result = await router.step(
            [router.row(1), router.row(2)], admissions=(make_admission(4, [1]),)
        )
        assert {f.rid for f in result.failures} == {1, 2, 4}  # 3 was not in the step
        assert {f.code for f in result.failures} == {"DSparkError"}
        assert "device lost" in result.failures[0].message
        assert "device lost" in caplog.text
        assert replica.engine.live == {3}
        await eventually(lambda: not drafter.sessions)
        await router.step([router.row(3)], admissions=(make_admission(5, PROMPT),))
        assert router.ids[3] == PROMPT + greedy_continuation(PROMPT, 2)
        assert router.ids[5] == PROMPT + greedy_continuation(PROMPT, 1)
        replica.node.check_health()


async def test_an_engine_that_fails_step_after_step_is_unhealthy(replica: Replica) -> None:
    """Two failures in a row are borne, and forgotten with the next good step; three are not."""
    async with make_router(replica) as router:
        rid = 0
        for num_failures, healthy in ((2, True), (3, False)):
            for _ in range(num_failures):
                rid += 1
                replica.engine.fail_next = RuntimeError("device lost")
                await router.step(admissions=(make_admission(rid, PROMPT),))
            if healthy:
                replica.node.check_health()
                await router.step(admissions=(make_admission(99, PROMPT),))
            else:
                with pytest.raises(Unavailable, match="3 steps in a row"):
                    replica.node.check_health()


class Broken(FakeEngine):
    """Fails for good, until emptied."""

    broken = False

    def step(self, step: Step) -> StepOutcome:
        if self.broken:
            raise RuntimeError("still broken")
        return super().step(step)

    def release_all(self) -> None:
        self.broken = False
        super().release_all()


async def test_an_engine_that_cannot_release_is_emptied() -> None:
    engine = Broken()
    async with make_replica(engine) as replica, make_router(replica) as router:
        await router.step(admissions=(make_admission(1, PROMPT), make_admission(2, PROMPT)))
        engine.broken = True
        result = await router.step([router.row(1)])
        assert {f.rid for f in result.failures} == {1, 2}
        assert result.free_kv_blocks == engine.limits.kv_blocks
        assert engine.live == frozenset()
        await router.step(admissions=(make_admission(3, PROMPT),))
        assert router.ids[3] == PROMPT + greedy_continuation(PROMPT, 1)


async def test_a_hung_engine_is_no_healthy_replica() -> None:
    """Routers leave it after ``step_timeout_s``; by the same measure the platform replaces it."""
    go_on = threading.Event()
    engine = FakeEngine(delay_s=lambda _: 1.0, sleep=lambda _: go_on.wait(10))
    config = load_config({"router": {"step_timeout_s": 0.1}})
    async with make_replica(engine, config) as replica, make_router(replica) as router:
        replica.node.check_health()
        await router.send(admissions=(make_admission(1, PROMPT),))
        await eventually(lambda: engine.num_steps == 1)
        await asyncio.sleep(0.15)
        with pytest.raises(Unavailable, match="running for over"):
            replica.node.check_health()
        go_on.set()
        await router.recv(StepResult)
        await asyncio.sleep(0)
        replica.node.check_health()


class Unspeakable(FakeEngine):
    """Gives a result that no frame can carry, once."""

    def step(self, step: Step) -> StepOutcome:
        outcome = super().step(step)
        if self.num_steps > 1:
            return outcome
        logprobs = np.full_like(outcome.result.logprobs, -np.inf)
        result = dataclasses.replace(outcome.result, logprobs=logprobs)
        return dataclasses.replace(outcome, result=result)


async def test_a_result_that_cannot_be_sent_ends_the_lane_at_once() -> None:
    """Else the router would wait for it until its step timeout, and all its clients with it."""
    async with make_replica(Unspeakable()) as replica:
        async with make_router(replica) as router:
            await router.send(admissions=(make_admission(1, PROMPT),))
            refusal = await router.recv(Refused)
            assert (refusal.code, refusal.fatal) == ("FrameError", True)
            assert "logprobs" in refusal.message
            with pytest.raises(Unavailable):
                await router.recv(StepResult)
        await eventually(lambda: replica.engine.live == frozenset())
        async with make_router(replica) as router:
            await router.step(admissions=(make_admission(1, PROMPT),))
            assert router.ids[1] == PROMPT + greedy_continuation(PROMPT, 1)


# --- draft sessions ----------------------------------------------------------------------------


def admit(rid: int, drafter: FakeDrafter, ids: Sequence[int] = PROMPT, **changes: Any) -> Any:
    options = {
        "drafter_id": drafter.member_id,
        "drafter_address": drafter.address,
        "session_epoch": 1,
        "want_draft": True,
        "max_new_tokens": 40,
    }
    return make_admission(rid, ids, **(options | changes))


@contextlib.asynccontextmanager
async def drafts_of(drafter: FakeDrafter) -> AsyncIterator[FrameStream]:
    """The stream that a router opens to a drafter, where blocks arrive."""
    hello = make_hello("router", "router-0")
    stream = await connect(drafter.address, hello, expect_role="drafter", timeout_s=5.0)
    await stream.send(Ping(nonce=0))
    assert isinstance(await stream.recv(), Pong)  # the drafter knows us now
    yield stream
    await stream.close()


async def test_the_whole_round(replica: Replica, drafter: FakeDrafter) -> None:
    """Prompt in chunks, then blocks from the drafter verified, to the end: right text, no fault."""
    async with make_router(replica) as router, drafts_of(drafter) as drafts:
        await router.step(admissions=(admit(1, drafter),), prefill_budget=3)
        await router.step(prefill_budget=3)
        await router.step(prefill_budget=3)
        accepted = 0
        while 1 not in router.finished:
            blocks = await read_blocks(drafts)
            assert (blocks.epoch.tolist(), blocks.anchor.tolist()) == (
                [1],
                [len(router.ids[1]) - 1],
            )
            assert int(blocks.digest[0]) == digest.of(router.ids[1])
            row = router.row(1, blocks.ids[0].tolist(), want_draft=True)
            accepted += int((await router.step([row])).num_accepted[0])
        assert router.ids[1] == PROMPT + greedy_continuation(PROMPT, 40)
        assert accepted == 39 - 7  # of the tokens after the first, all but a bonus in 7 of 8 rounds
        await eventually(lambda: not drafter.sessions)  # released when it finished
        assert drafter.faults == []
        assert replica.node.cache.num_bytes == 0


async def test_commits_are_handed_over_before_the_result_is_sent(
    replica: Replica, drafter: FakeDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    commit, send = DraftLinks.commit, FrameStream.send

    def record_commit(self: DraftLinks, updates: Iterable[Update]) -> None:
        known = list(updates)
        order.extend("commit" for _ in known)
        commit(self, known)

    async def record_send(self: FrameStream, frame: Frame) -> None:
        if isinstance(frame, StepResult):
            order.append("result")
        await send(self, frame)

    monkeypatch.setattr(DraftLinks, "commit", record_commit)
    monkeypatch.setattr(FrameStream, "send", record_send)
    async with make_router(replica) as router:
        await router.step(admissions=(admit(1, drafter),))
        await router.step([router.row(1)])
    assert order == ["commit", "result"] * 2


async def test_no_draft_is_made_unless_wanted(replica: Replica, drafter: FakeDrafter) -> None:
    async with make_router(replica) as router, drafts_of(drafter):
        await router.step(admissions=(admit(1, drafter, want_draft=False),))
        await router.step([router.row(1)])
        await router.step([router.row(1, want_draft=True)])
        await eventually(lambda: drafter.num_blocks == 1)
        session = drafter.sessions["router-0", 1]
        assert session.ids == router.ids[1]


async def test_a_released_request_releases_its_session(
    replica: Replica, drafter: FakeDrafter
) -> None:
    async with make_router(replica) as router:
        await router.step(admissions=(admit(1, drafter), admit(2, drafter)))
        await eventually(lambda: len(drafter.sessions) == 2)
        await router.step(releases=np.array([1, 55], np.int64))
        await eventually(lambda: len(drafter.sessions) == 1)
        assert replica.engine.live == {2}


async def test_a_refused_admission_leaves_no_session(
    replica: Replica, drafter: FakeDrafter
) -> None:
    async with make_router(replica) as router:
        await router.step(admissions=(admit(1, drafter, [1, 500]), admit(2, drafter)))
        await eventually(lambda: drafter.num_opens == 2 and len(drafter.sessions) == 1)


async def test_a_dead_drafter_is_reported_and_the_session_moves(
    replica: Replica, drafter: FakeDrafter
) -> None:
    other = FakeDrafter(member_id="drafter-1")
    await other.start()
    async with make_router(replica) as router, drafts_of(other) as drafts:
        await router.step(admissions=(admit(1, drafter), make_admission(2, PROMPT)))
        for _ in range(3):
            await router.step([router.row(1), router.row(2)])
        await eventually(lambda: drafter.num_opens == 1)
        await drafter.stop()
        await eventually(lambda: replica.node.links.counters.links_failed == 1)
        result = await router.step([router.row(1), router.row(2)])
        assert result.unbound.tolist() == [1]
        rebind = Rebind(
            rid=1,
            drafter_id=other.member_id,
            drafter_address=other.address,
            session_epoch=2,
            want_draft=True,
        )
        # The plain request may get a drafter as well; an unknown one is nobody's.
        late = dataclasses.replace(rebind, rid=2, session_epoch=7, want_draft=False)
        gone = dataclasses.replace(rebind, rid=99)
        ids_before = list(router.ids[1])
        result = await router.step([router.row(2)], rebinds=(rebind, late, gone))
        assert result.unbound.tolist() == []
        blocks = await read_blocks(drafts)
        assert (blocks.rid.tolist(), blocks.epoch.tolist()) == ([1], [2])
        assert int(blocks.digest[0]) == digest.of(ids_before)
        await router.step([router.row(1, blocks.ids[0].tolist()), router.row(2)])
        await eventually(lambda: other.sessions["router-0", 1].ids == router.ids[1])
        await eventually(lambda: other.sessions["router-0", 2].ids == router.ids[2])
        assert other.faults == []
    await other.stop()


async def test_rebinding_to_nobody_drops_the_session(
    replica: Replica, drafter: FakeDrafter
) -> None:
    async with make_router(replica) as router:
        await router.step(admissions=(admit(1, drafter),))
        await eventually(lambda: drafter.sessions)
        nobody = Rebind(rid=1, drafter_id="", drafter_address="", session_epoch=2, want_draft=False)
        result = await router.step([router.row(1)], rebinds=(nobody,))
        assert result.unbound.tolist() == []
        await eventually(lambda: not drafter.sessions)


async def test_a_rebind_during_prefill_drafts_when_it_ends(
    replica: Replica, drafter: FakeDrafter
) -> None:
    async with make_router(replica) as router, drafts_of(drafter) as drafts:
        await router.step(admissions=(make_admission(1, PROMPT),), prefill_budget=3)
        bind = Rebind(
            rid=1,
            drafter_id=drafter.member_id,
            drafter_address=drafter.address,
            session_epoch=3,
            want_draft=True,
        )
        await router.step(rebinds=(bind,), prefill_budget=64)
        blocks = await read_blocks(drafts)
        assert blocks.anchor.tolist() == [len(PROMPT)]
        assert drafter.num_blocks == 1
        assert drafter.faults == []


async def test_without_kept_features_a_session_stays_plain(drafter: FakeDrafter) -> None:
    async with (
        make_replica(config=make_config(feature_cache_bytes=0)) as replica,
        make_router(replica) as router,
    ):
        await router.step(admissions=(admit(1, drafter),))
        bind = Rebind(
            rid=1,
            drafter_id=drafter.member_id,
            drafter_address=drafter.address,
            session_epoch=2,
            want_draft=True,
        )
        result = await router.step([router.row(1)], rebinds=(bind,))
        assert result.unbound.tolist() == [1]
        await router.step([router.row(1)])
        assert router.ids[1] == PROMPT + greedy_continuation(PROMPT, 3)


async def test_a_session_that_its_drafter_lost_is_reported(
    replica: Replica, drafter: FakeDrafter
) -> None:
    async with make_router(replica) as router, drafts_of(drafter) as drafts:
        await router.step(admissions=(admit(1, drafter),))
        await read_blocks(drafts)
        await drafter.lose("router-0", 1)
        await eventually(lambda: replica.node.links.counters.lost == 1)
        assert isinstance(await drafts.recv(), Lost)
        assert (await router.step([router.row(1)])).unbound.tolist() == [1]
        assert (await router.step([router.row(1)])).unbound.tolist() == []


class NotFinite(FakeEngine):
    """Features of request 1 overflow after the prompt."""

    def step(self, step: Step) -> StepOutcome:
        outcome = super().step(step)
        committed = tuple(
            dataclasses.replace(rows, features=torch.full_like(rows.features, torch.inf))
            if rows.rid == 1 and rows.first_position > 0 and rows.features is not None
            else rows
            for rows in outcome.committed
        )
        return dataclasses.replace(outcome, committed=committed)


async def test_unfit_features_cost_the_session_not_the_request(drafter: FakeDrafter) -> None:
    async with make_replica(NotFinite()) as replica, make_router(replica) as router:
        await router.step(admissions=(admit(1, drafter), admit(2, drafter, PROMPT[::-1])))
        result = await router.step([router.row(1), router.row(2)])
        assert result.unbound.tolist() == [1]
        assert router.ids[1] == PROMPT + greedy_continuation(PROMPT, 2)
        await eventually(lambda: set(drafter.sessions) == {("router-0", 2)})
        assert drafter.faults == []


async def test_an_engine_without_projection_commits_ids(drafter: FakeDrafter) -> None:
    async with (
        make_replica(FakeEngine(has_projection=False)) as replica,
        make_router(replica) as router,
        drafts_of(drafter) as drafts,
    ):
        await router.step(admissions=(admit(1, drafter),))
        await read_blocks(drafts)
        assert drafter.sessions["router-0", 1].ids == router.ids[1]
        assert drafter.faults == []


# --- strangers, drain, directory ---------------------------------------------------------------


async def test_wrong_tokens_models_and_frames(replica: Replica) -> None:
    with pytest.raises(AuthError):
        async with make_router(replica, token="wrong"):
            pass
    with pytest.raises(ProtocolMismatch):
        await connect(
            replica.node.address, make_hello("drafter"), expect_role="verifier", timeout_s=5.0
        )
    async with make_router(replica, acquire=False, model="another") as router:
        refusal = await router.recv(Refused)
        assert isinstance(error_for(refusal.code, refusal.message), ProtocolMismatch)
    async with make_router(replica) as holder:
        async with make_router(replica, "router-1", acquire=False) as router:
            await router.stream.send(Release(lane_id="x", rid=np.zeros(0, np.int64)))
            refusal = await router.recv(Refused)
            assert (refusal.code, refusal.fatal) == ("FrameError", True)
        await holder.step()  # nobody else noticed
    assert replica.node.counters.refused == 4


async def test_the_directory_knows_the_replica(replica: Replica) -> None:
    async with make_router(replica) as router:
        await router.step(admissions=(make_admission(1, PROMPT),))
        await asyncio.sleep(0.1)  # several heartbeats
        (member,) = await replica.directory.members()
        assert member.load == 1.0
        assert (member.member_id, member.role) == ("verifier-0", "verifier")
        assert member.address == replica.node.address
        assert member.model == "fake-target"
        assert member.lane_owner == "router-0"
        assert member.details["kv_free_blocks"] == replica.engine.free_kv_blocks
    await replica.node.stop()
    assert await replica.directory.members() == ()


class Gauged(FakeEngine):
    """Tells how full it is."""

    def step(self, step: Step) -> StepOutcome:
        gauges = {"prefix_blocks": float(self.num_steps)}
        return dataclasses.replace(super().step(step), gauges=gauges)


async def test_the_directory_knows_the_gauges_of_the_engine() -> None:
    async with make_replica(Gauged()) as replica, make_router(replica) as router:
        await router.step(admissions=(make_admission(1, PROMPT),))
        await router.step()
        assert replica.node.describe().details["prefix_blocks"] == 1.0


async def test_drain_finishes_what_is_there(replica: Replica) -> None:
    assert await replica.node.drain(0.01)  # idle: at once
    async with make_router(replica, "router-1", acquire=False) as router:
        await router.stream.send(Acquire(lane_id="router-1"))
        assert "draining" in (await router.recv(Refused)).message
    assert replica.node.describe().draining


async def test_drain_tells_the_holder_and_waits(replica: Replica) -> None:
    async with make_router(replica) as router:
        await router.step(admissions=(make_admission(1, PROMPT, max_new_tokens=2),))
        assert not await replica.node.drain(0.05)
        assert await router.recv(Drain) == Drain(deadline_s=0.05)
        draining = asyncio.create_task(replica.node.drain(10.0))
        assert await router.recv(Drain) == Drain(deadline_s=10.0)
        await router.step([router.row(1)])
        assert router.finished == {1: 2}
        assert await draining
        await router.stream.send(Drain(deadline_s=1.0))  # a router may say so too
        await router.step()


async def test_stopping_ends_the_streams(replica: Replica) -> None:
    async with make_router(replica) as router:
        await router.step(admissions=(make_admission(1, PROMPT),))
        await replica.node.stop()
        with pytest.raises(Unavailable):
            await router.stream.recv()
    assert replica.engine.live == frozenset()
