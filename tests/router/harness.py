"""A whole small cluster in one event loop: real routers and verifiers, fake engine and drafters."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from cluster.config import Config, load_config
from cluster.directory import Heartbeat, LocalDirectory
from cluster.members import Member
from router.admission import ModelLimits
from router.node import RouterNode
from router.request import Delta, GenerateRequest
from tests.fakes import VOCAB_SIZE, FakeDrafter, FakeEngine, greedy_continuation
from tests.frames import make_sampling
from verifier_service.node import VerifierNode
from verifier_service.profiling import StepProfile

DRAFTER = "fake-drafter"
EOS = VOCAB_SIZE - 1
MAX_MODEL_LEN = 256
PROFILE = StepProfile(num_tokens=(1, 128), step_s=(0.010, 0.012))
"""Drafts nearly free, so that the scheduler verifies whole blocks."""


class CharTokenizer:
    """One visible character per id; the EOS id is special."""

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool) -> str:
        return "".join(chr(0x100 + i) for i in token_ids if not (skip_special_tokens and i == EOS))


def text_of(ids: list[int]) -> str:
    return CharTokenizer().decode(ids, skip_special_tokens=True)


def expected_ids(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """Greedy text of the made-up law, which ends with the EOS id if that comes up."""
    ids = greedy_continuation(prompt, num_tokens)
    return ids[: ids.index(EOS) + 1] if EOS in ids else ids


def request_id(prompt: tuple[int, ...]) -> str:
    return "-".join(map(str, prompt[:16])) or "empty"


def make_request(prompt: tuple[int, ...], num_tokens: int = 24, **changes: Any) -> GenerateRequest:
    values: dict[str, Any] = {
        "request_id": request_id(prompt),
        "ids": prompt,
        "sampling": make_sampling(),
        "max_new_tokens": num_tokens,
    }
    return GenerateRequest(**(values | changes))


@dataclass
class Answer:
    """A stream, read to its end."""

    deltas: list[Delta] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def finish(self) -> str:
        assert [d.finish_reason for d in self.deltas[:-1]] == [""] * (len(self.deltas) - 1)
        return self.deltas[-1].finish_reason

    @property
    def usage(self) -> Any:
        return self.deltas[-1].usage


async def ask(router: RouterNode, request: GenerateRequest, answer: Answer | None = None) -> Answer:
    answer = answer or Answer()
    async for delta in router.generate(request):
        answer.deltas.append(delta)
    return answer


async def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition that must come true; a generous bound, never a measurement."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - the condition belongs to production code
                await asyncio.sleep(0.005)
    assert condition(), what


class Cluster:
    """Members that share one directory; stopped together, and checked for leaks."""

    def __init__(self, **config: Any) -> None:
        self.config: Config = load_config(
            {
                "cluster": {"heartbeat_s": 0.03, "member_ttl_s": 5.0, "connect_timeout_s": 5.0},
                "verifier": {"lease_ttl_s": 5.0},
                "router": {"draft_timeout_s": 0.5, **config},
            }
        )
        self.directory = LocalDirectory(self.config.cluster.member_ttl_s)
        self.routers: list[RouterNode] = []
        self.verifiers: dict[str, VerifierNode] = {}
        self.engines: dict[str, FakeEngine] = {}
        self.drafters: dict[str, FakeDrafter] = {}
        self._beats: dict[str, Heartbeat] = {}

    async def add_verifier(
        self,
        member_id: str = "verifier-0",
        *,
        engine: FakeEngine | None = None,
        profile: StepProfile = PROFILE,
        device: str = "",
        **options: Any,
    ) -> VerifierNode:
        engine = engine or FakeEngine(max_model_len=MAX_MODEL_LEN, **options)
        self.engines[member_id] = engine
        node = VerifierNode(
            member_id=member_id,
            engine=engine,
            config=self.config,
            directory=self.directory,
            drafter=DRAFTER,
            device=device,
            profile=profile,
        )
        await node.start()
        self.verifiers[member_id] = node
        return node

    async def add_drafter(
        self, drafter: FakeDrafter | None = None, *, device: str = "", **options: Any
    ) -> FakeDrafter:
        drafter = drafter or FakeDrafter(drafter=DRAFTER, **options)
        await drafter.start()

        def describe() -> Member:
            return Member(
                member_id=drafter.member_id,
                role="drafter",
                address=drafter.address,
                incarnation=1,
                model="",
                drafter=DRAFTER,
                load=float(len(drafter.sessions)),
                device=device,
            )

        beat = Heartbeat(self.directory, describe, period_s=0.03)
        beat.start()
        self.drafters[drafter.member_id] = drafter
        self._beats[drafter.member_id] = beat
        return drafter

    async def add_router(self, member_id: str = "router-0") -> RouterNode:
        node = RouterNode(
            member_id=member_id,
            config=self.config,
            directory=self.directory,
            tokenizer=CharTokenizer(),
            limits=ModelLimits(
                vocab_size=VOCAB_SIZE,
                max_model_len=MAX_MODEL_LEN,
                eos_ids=(EOS,),
                fingerprint="fake-target",
            ),
        )
        await node.start()
        self.routers.append(node)
        return node

    async def ready(self, router: RouterNode, *, lanes: int = 1, drafters: int = 0) -> None:
        def done() -> bool:
            figures = router.metrics()
            links = sum(name.startswith("sessions.") for name in figures)
            return figures["lanes"] == lanes and links == drafters

        await eventually(done, f"{lanes} lanes, {drafters} drafters: {router.metrics()}")

    async def kill_verifier(self, member_id: str) -> None:
        """Its streams break without a word."""
        node = self.verifiers.pop(member_id)
        del self.engines[member_id]
        await node.stop()

    async def kill_drafter(self, member_id: str) -> None:
        await self._beats.pop(member_id).stop()
        await self.drafters.pop(member_id).stop()

    def assert_empty(self) -> None:
        """No request anywhere: in no router, no lane, no engine, no draft session."""
        for router in self.routers:
            figures = router.metrics()
            held = {k: figures[k] for k in ("live", "queued", "in_lanes", "lent")}
            assert not any(held.values()), held
        for member_id, engine in self.engines.items():
            assert not engine.live, f"{member_id} holds {engine.live}"

    async def settle(self) -> None:
        """Wait until releases have arrived, then look for leaks."""

        def done() -> bool:
            try:
                self.assert_empty()
            except AssertionError:
                return False
            return not any(drafter.sessions for drafter in self.drafters.values())

        with contextlib.suppress(AssertionError):
            await eventually(done, "")
        self.assert_empty()
        for drafter in self.drafters.values():
            assert not drafter.sessions, drafter.sessions

    async def stop(self) -> None:
        for router in self.routers:
            await router.stop()
        for verifier in self.verifiers.values():
            await verifier.stop()
        for member_id in tuple(self.drafters):
            await self.kill_drafter(member_id)


@contextlib.asynccontextmanager
async def cluster(**config: Any) -> AsyncIterator[Cluster]:
    """A cluster that leaves no task behind."""
    before = asyncio.all_tasks()
    made = Cluster(**config)
    try:
        yield made
        await made.settle()
    finally:
        await made.stop()
    await asyncio.sleep(0)
    left = {t for t in asyncio.all_tasks() - before if "grpc" not in repr(t)}
    assert not left, left
