"""Closed and open loops against a scripted server."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from cluster.errors import AuthError, ConfigError, Overloaded, Unavailable
from dspark.async_client import AsyncClient
from dspark.bench.asks import Mix
from dspark.bench.load import Load, closed_loop, open_loop
from dspark.bench.measure import Measured, Plan, measure
from tests.dspark.bench.made_samples import make_prompt
from tests.dspark.fake_server import WORDS, FakeDSpark
from tests.waiting import eventually

MIX = Mix(prompts=[make_prompt("one", domain="math"), make_prompt("two")], seed=1)


def silent(what: str, share: float, load: Load) -> None:
    """Nobody looks."""


async def measured(address: str, plan: Plan) -> Measured:
    async with AsyncClient(address) as client:
        return await measure(client, MIX, plan, silent)


async def test_a_closed_loop_keeps_its_users_busy(fake: FakeDSpark, address: str) -> None:
    fake.pause_s = 0.02
    result = await measured(address, Plan(users=3, warm_up_s=0.1, duration_s=0.5))
    figures = result.figures
    assert figures["requests"]["unfinished"] == 0
    assert figures["requests"]["completed"] == figures["requests"]["scheduled"] > 3
    assert figures["rates"]["mean_concurrency"] == pytest.approx(3, abs=0.3)
    assert figures["rates"]["accepted_length"] == 1.0
    assert figures["drafts"]["verified_per_round"] == 1.0
    assert set(figures["domains"]) == {"math", "chat"}
    assert fake.requests[0].chat.messages[0].content in ("one", "two")
    assert result.counters == {"num_steps": 0.0}
    assert 0 <= result.client["cpu_share"] < 1.5


async def test_a_number_of_requests_counts_the_first_ones(fake: FakeDSpark, address: str) -> None:
    result = await measured(address, Plan(users=2, warm_up_s=0.0, requests=7, raw=True))
    assert result.figures["requests"]["scheduled"] == 7
    assert result.figures["requests"]["completed"] == 7
    assert fake.requests[0].text in ("one", "two")


async def test_open_arrivals_wait_for_nobody_and_lose_no_time(
    fake: FakeDSpark, address: str
) -> None:
    """Coordinated omission: while the client itself stands still, arrivals stay on schedule."""
    gaps = random.Random(f"arrivals/{MIX.seed}")
    async with AsyncClient(address) as client, open_loop(client, MIX, rate=50.0) as load:
        began_s = load.clock()
        await asyncio.sleep(0.1)
        time.sleep(0.4)  # noqa: ASYNC251 - the client hangs
        await asyncio.sleep(0.2)
        samples = tuple(load.samples)
    expected = began_s
    for sample in samples:
        expected += gaps.expovariate(50.0)
        assert sample.scheduled_s == pytest.approx(expected, abs=0.02)
    assert len(samples) > 10
    assert max(sample.sent_s - sample.scheduled_s for sample in samples) > 0.2
    waits = [sample.ttft_s for sample in samples if sample.ttft_s is not None]
    assert max(waits) > 0.2, "the time on hold counts"


async def test_open_loop_is_measured_too(fake: FakeDSpark, address: str) -> None:
    result = await measured(address, Plan(rate=60.0, warm_up_s=0.0, duration_s=0.5))
    assert result.figures["requests"]["completed"] > 10
    assert result.client["late_s"]["most"] < 5


async def test_what_is_still_running_is_cancelled_at_the_end(
    fake: FakeDSpark, address: str
) -> None:
    fake.hold = True
    async with AsyncClient(address) as client:
        async with closed_loop(client, MIX, users=2) as load:
            await eventually(lambda: sum(sample.num_tokens for sample in load.samples) == 2)
        assert [sample.ended_s for sample in load.samples] == [None, None]
    assert {request.request_id for request in fake.requests} >= set(fake.cancelled)
    assert len(fake.cancelled) == 2


async def test_some_errors_are_counted_by_kind(fake: FakeDSpark, address: str) -> None:
    async with AsyncClient(address) as client, closed_loop(client, MIX, users=1) as load:
        fake.error, fake.fail_after = Overloaded("full"), len(WORDS) - 1
        await eventually(lambda: load.errors)
    assert [sample.error for sample in load.samples if sample.error] == ["Overloaded"]
    assert load.samples[-1].usage is None


async def test_a_measurement_of_nothing_is_an_error(fake: FakeDSpark, address: str) -> None:
    fake.error = AuthError("no token")
    with pytest.raises(AuthError):
        await measured(address, Plan(users=1, warm_up_s=0.0, duration_s=0.2))
    fake.error, fake.hold = None, True
    with pytest.raises(ConfigError, match="none was answered in time"):
        await measured(address, Plan(users=1, warm_up_s=0.0, duration_s=0.2, drain_s=0.1))


async def test_an_absent_server_is_found_first() -> None:
    with pytest.raises(Unavailable):
        await measured("127.0.0.1:9", Plan(users=1, duration_s=1.0))


async def test_a_fault_of_the_load_itself_does_not_look_like_silence(
    fake: FakeDSpark, address: str
) -> None:
    class Broken(Mix):
        def ask(self, user: int, turn: int, *, midway: bool = False) -> None:  # type: ignore[override]
            raise RuntimeError("a fault of ours")

    async with AsyncClient(address) as client:
        with pytest.raises(RuntimeError, match="a fault of ours"):
            await measure(
                client, Broken(prompts=MIX.prompts), Plan(users=1, duration_s=5.0), silent
            )


@pytest.mark.parametrize(
    "values",
    [
        {"users": 1, "rate": 1.0, "duration_s": 1.0},
        {"duration_s": 1.0},
        {"users": 1},
        {"users": 1, "duration_s": 1.0, "requests": 5},
        {"users": 0, "duration_s": 1.0},
        {"rate": float("inf"), "duration_s": 1.0},
        {"users": 1, "duration_s": -1.0},
        {"users": 1, "duration_s": 1.0, "warm_up_s": -1.0},
    ],
)
def test_impossible_plans_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Plan(**values)  # type: ignore[arg-type]
