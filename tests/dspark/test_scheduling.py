"""Scheduling and profile through the clients and the command."""

from __future__ import annotations

import pytest

from cluster.errors import DSparkError, InvalidRequest
from dspark import AsyncClient, Client
from dspark.cli import main
from tests.dspark.fake_server import FakeDSpark


def test_changes_carry_texts_and_answer_with_all_values(fake: FakeDSpark, address: str) -> None:
    with Client(address, token="secret") as client:
        assert client.get_scheduling() == {"policy": "adaptive", "gate_drafts": "true"}
        answer = client.set_scheduling({"policy": "fixed:2", "gate_drafts": False})
    assert answer == {"policy": "fixed:2", "gate_drafts": "false"} == fake.scheduling
    assert all(sent["authorization"] == "Bearer secret" for sent in fake.metadata)


async def test_the_async_client_does_the_same(fake: FakeDSpark, address: str) -> None:
    async with AsyncClient(address) as client:
        await client.set_scheduling({"policy": "none"})
        assert (await client.get_scheduling())["policy"] == "none"
        assert (await client.get_profile())["router"] == "r"


def test_mistakes_are_typed(fake: FakeDSpark, address: str) -> None:
    with Client(address) as client:
        with pytest.raises(InvalidRequest, match="colour: unknown key"):
            client.set_scheduling({"colour": "red"})
        with pytest.raises(InvalidRequest, match="cannot be None"):
            client.set_scheduling({"policy": None})  # type: ignore[dict-item]
        fake.profile = "[]"
        with pytest.raises(DSparkError, match="no object"):
            client.get_profile()


def test_the_command_shows_and_sets(
    fake: FakeDSpark, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["scheduling", "--address", address]
    assert main(command) == 0
    assert capsys.readouterr().out == "gate_drafts=true\npolicy=adaptive\n"
    assert main([*command, "--set", "policy=fixed:2", "--set", "gate_drafts=false"]) == 0
    assert capsys.readouterr().out == "gate_drafts=false\npolicy=fixed:2\n"
    assert fake.scheduling["policy"] == "fixed:2"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--set", "policy"], "expected KEY=VALUE"),
        (["--set", "=none"], "expected KEY=VALUE"),
        (["--set", "policy=none", "--set", "policy=full"], "policy is set twice"),
        (["--set", "colour=red"], "router.scheduling.colour: unknown key"),
    ],
)
def test_the_command_names_what_is_wrong(
    fake: FakeDSpark,
    address: str,
    flags: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["scheduling", "--address", address, *flags]) == 2
    assert named in capsys.readouterr().err
    assert fake.scheduling["policy"] == "adaptive"
