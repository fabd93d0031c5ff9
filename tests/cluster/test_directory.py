"""The directory: who is alive, through outages and restarts."""

from __future__ import annotations

import asyncio
import dataclasses
import logging

import pytest

from cluster.directory import DirectoryState, Heartbeat, LocalDirectory, RayDirectory
from cluster.errors import ConfigError, Unavailable
from cluster.members import Member
from tests.waiting import eventually


def member(member_id: str = "v0", **changes: object) -> Member:
    base = Member(
        member_id=member_id,
        role="verifier",
        address="127.0.0.1:1",
        incarnation=1,
        model="m",
        drafter="d",
        load=0.0,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_members_live_as_long_as_they_are_heard() -> None:
    state = DirectoryState(5.0)
    state.heartbeat(member("b"), 0.0)
    state.heartbeat(member("a"), 3.0)
    assert [m.member_id for m in state.members(5.0)] == ["a", "b"]
    assert [m.member_id for m in state.members(5.1)] == ["a"]
    state.heartbeat(member("b", load=2.0), 6.0)
    assert [m.load for m in state.members(6.0)] == [0.0, 2.0]
    state.leave("a")
    state.leave("never seen")
    assert [m.member_id for m in state.members(6.0)] == ["b"]


def test_a_ghost_does_not_replace_its_successor() -> None:
    state = DirectoryState(5.0)
    state.heartbeat(member(incarnation=1), 0.0)
    state.heartbeat(member(incarnation=2, address="127.0.0.1:2"), 1.0)
    state.heartbeat(member(incarnation=1), 2.0)
    assert [m.incarnation for m in state.members(2.0)] == [2]
    state.heartbeat(member(incarnation=1), 9.0)  # the successor is gone by then
    assert [m.incarnation for m in state.members(9.0)] == [1]


@pytest.mark.parametrize("ttl_s", [0.0, -1.0])
def test_a_ttl_must_be_positive(ttl_s: float) -> None:
    with pytest.raises(ConfigError):
        DirectoryState(ttl_s)
    with pytest.raises(ConfigError):
        Heartbeat(LocalDirectory(5.0), member, period_s=ttl_s)


async def test_local_directory_uses_its_clock() -> None:
    now = 0.0
    directory = LocalDirectory(5.0, clock=lambda: now)
    await directory.heartbeat(member())
    assert await directory.members() == (member(),)
    now = 6.0
    assert await directory.members() == ()
    await directory.heartbeat(member())
    await directory.leave("v0")
    assert await directory.members() == ()


class Flaky(LocalDirectory):
    """Away while told so."""

    def __init__(self) -> None:
        super().__init__(5.0)
        self.away = False
        self.beats = 0

    async def heartbeat(self, member: Member) -> None:
        self.beats += 1
        if self.away:
            raise Unavailable("the directory is away")
        await super().heartbeat(member)

    async def leave(self, member_id: str) -> None:
        if self.away:
            raise Unavailable("the directory is away")
        await super().leave(member_id)


async def beats(directory: Flaky, number: int) -> None:
    await eventually(lambda: directory.beats >= number)


async def test_heartbeat_describes_each_time_and_leaves() -> None:
    directory = Flaky()
    load = 0.0
    heartbeat = Heartbeat(directory, lambda: member(load=load), period_s=0.01)
    heartbeat.start()
    heartbeat.start()  # again is fine
    await beats(directory, 1)
    load = 3.0
    await beats(directory, 3)
    assert (await directory.members())[0].load == 3.0
    await heartbeat.stop()
    await heartbeat.stop()
    assert await directory.members() == ()
    count = directory.beats
    await asyncio.sleep(0.05)
    assert directory.beats == count


async def test_beat_now_does_not_wait_for_the_period() -> None:
    directory = Flaky()
    heartbeat = Heartbeat(directory, member, period_s=1000.0)
    heartbeat.start()
    await beats(directory, 1)
    await asyncio.sleep(0.02)
    assert directory.beats == 1
    heartbeat.beat_now()
    await beats(directory, 2)
    await heartbeat.stop()


async def test_an_outage_is_survived_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    directory = Flaky()
    directory.away = True
    heartbeat = Heartbeat(directory, member, period_s=0.01)
    with caplog.at_level(logging.INFO, "cluster.directory"):
        heartbeat.start()
        await beats(directory, 5)
        directory.away = False
        await beats(directory, 7)
        directory.away = True
        await beats(directory, 9)
        await heartbeat.stop()  # the outage does not keep it from stopping
    said = [record.getMessage() for record in caplog.records]
    assert [text.split(",")[0] for text in said] == [
        "directory unreachable",
        "directory reachable again",
        "directory unreachable",
    ]


async def test_a_describe_that_fails_does_not_end_the_loop() -> None:
    directory = Flaky()
    calls = 0

    def describe() -> Member:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ZeroDivisionError
        return member()

    heartbeat = Heartbeat(directory, describe, period_s=0.01)
    heartbeat.start()
    await beats(directory, 2)
    await heartbeat.stop()


def test_ray_directory_needs_a_name_and_a_timeout() -> None:
    with pytest.raises(ConfigError, match="application"):
        RayDirectory("", ttl_s=5.0)
    with pytest.raises(ConfigError, match="timeout_s"):
        RayDirectory("dspark", ttl_s=5.0, timeout_s=0.0)
