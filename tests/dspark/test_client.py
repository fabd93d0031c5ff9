"""The clients: streams, whole texts, options, cancellation, typed errors."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.errors import (
    AuthError,
    BadConstraint,
    BadSamplingParameter,
    DeadlineExceeded,
    DSparkError,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    Unavailable,
)
from dspark import AsyncClient, Client
from tests.dspark.fake_server import WORDS, FakeDSpark

TEXT = "".join(WORDS)


def test_streams_chunks_and_ends_with_usage(fake: FakeDSpark, address: str) -> None:
    with Client(address) as client:
        generation = client.generate("Hi", logprobs=True)
        chunks = list(generation)
    assert [chunk.text for chunk in chunks] == list(WORDS)
    assert [chunk.usage is None for chunk in chunks] == [True, True, False]
    assert generation.text == TEXT
    assert generation.token_ids == [0, 1, 2]
    assert generation.logprobs == [-0.5] * 3
    assert generation.finish_reason == "stop"
    assert generation.usage is not None
    assert (generation.usage.completion_tokens, generation.usage.seed) == (3, 7)


async def test_async_client_streams_too(fake: FakeDSpark, address: str) -> None:
    async with AsyncClient(address) as client:
        generation = client.generate(token_ids=[1, 2])
        assert [chunk.text async for chunk in generation] == list(WORDS)
        assert await generation.text() == TEXT
        assert await client.generate("Hi").text() == TEXT
        assert (await client.get_model()).metrics == {"num_steps": 2.0}
    assert list(fake.requests[0].token_ids.ids) == [1, 2]


def test_options_reach_the_server_and_absent_ones_stay_absent(
    fake: FakeDSpark, address: str
) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with Client(address, token="secret", application="mine") as client:
        first = client.generate(
            messages=messages,
            max_tokens=5,
            temperature=0.7,
            seed=0,
            mode="rejection",
            logit_bias={3: -1.5},
            stop=["x"],
            draft=False,
            deadline_s=2.0,
            target_tokens_per_s=12.5,
            tier="batch",
            json_schema={"type": "object"},
            adapter="sql",
            request_id="r1",
        )
        assert first.text == TEXT
        _ = client.generate("Hi").text
    request, bare = fake.requests
    assert request.chat.messages[0].content == "Hi"
    assert (request.request_id, request.max_tokens, request.draft) == ("r1", 5, False)
    assert request.sampling.HasField("seed")
    assert request.sampling.mode == 2
    assert request.sampling.logit_bias[3] == -1.5
    assert list(request.stop) == ["x"]
    assert request.deadline_s == 2.0
    assert (request.target_tokens_per_s, request.tier) == (12.5, "batch")
    assert request.constraint.json_schema == '{"type": "object"}'
    assert request.adapter == "sql"
    assert fake.metadata[0]["authorization"] == "Bearer secret"
    assert fake.metadata[0]["application"] == "mine"
    assert bare.request_id
    assert (bare.tier, bare.adapter) == ("", "")
    assert not bare.HasField("constraint")
    for name in ("max_tokens", "draft", "deadline_s", "target_tokens_per_s"):
        assert not bare.HasField(name)
    assert not bare.sampling.HasField("seed")


def test_token_comes_from_the_environment(
    fake: FakeDSpark, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_TOKEN", "from-env")
    with Client(address) as client:
        _ = client.generate("Hi").text
    assert fake.metadata[0]["authorization"] == "Bearer from-env"


@pytest.mark.parametrize(
    "error",
    [
        AuthError("wrong token", hint="set DSPARK_TOKEN"),
        BadSamplingParameter("temperature -1.0 is out of range", hint="0 for greedy"),
        PromptTooLong("too long\nover two lines"),
        BadConstraint("line 3 of the grammar: " + "né" * 200, hint="define né"),
        Overloaded("queue full", retry_after_s=2.5),
        DeadlineExceeded("deadline passed"),
    ],
)
def test_errors_come_back_as_what_they_were(
    fake: FakeDSpark, address: str, error: DSparkError
) -> None:
    fake.error = error
    with Client(address) as client, pytest.raises(type(error)) as caught:
        _ = client.generate("Hi").text
    assert type(caught.value) is type(error)
    assert (caught.value.message, caught.value.hint) == (error.message, error.hint)


@pytest.mark.parametrize("char", ["x", "é", "🎈"])
def test_a_long_error_is_cut_and_stays_what_it_is(
    fake: FakeDSpark, address: str, char: str
) -> None:
    """Past the limit of a header the client would see another error, and try again."""
    fake.error = BadConstraint(char * 4096, hint=char * 4096)
    with Client(address) as client, pytest.raises(BadConstraint) as caught:
        _ = client.generate("Hi").text
    assert caught.value.message.startswith(char * 100)


async def test_the_async_client_takes_the_same_options(fake: FakeDSpark, address: str) -> None:
    async with AsyncClient(address) as client:
        assert await client.generate("Hi", choice=["yes", "no"], adapter="sql").text() == TEXT
        with pytest.raises(BadConstraint):
            client.generate("Hi", choice=["yes"], json_object=True)
    (request,) = fake.requests
    assert list(request.constraint.choice.texts) == ["yes", "no"]
    assert request.adapter == "sql"


async def test_an_error_midway_keeps_what_came_before(fake: FakeDSpark, address: str) -> None:
    fake.error, fake.fail_after = Unavailable("verifier gone"), 2
    async with AsyncClient(address) as client:
        generation = client.generate("Hi")
        with pytest.raises(Unavailable, match="verifier gone"):
            await generation.text()
        assert generation.text_so_far == "The quick "


def test_nobody_listening_is_unavailable_with_a_hint() -> None:
    with Client("127.0.0.1:9", timeout_s=5) as client, pytest.raises(Unavailable) as caught:
        client.get_model()
    assert "127.0.0.1:9" in caught.value.message
    assert "dspark serve" in caught.value.hint


def test_timeout_is_deadline_exceeded(fake: FakeDSpark, address: str) -> None:
    fake.hold = True
    with Client(address, timeout_s=0.3) as client, pytest.raises(DeadlineExceeded):
        _ = client.generate("Hi").text


@pytest.mark.parametrize("given", [{}, {"prompt": "Hi", "token_ids": [1]}])
def test_exactly_one_input(given: dict[str, Any]) -> None:
    with Client("127.0.0.1:9") as client, pytest.raises(InvalidRequest, match="exactly one"):
        client.generate(**given)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temprature": 1.0}, "temprature"),
        ({"mode": "magic"}, "magic"),
        ({"seed": -1}, "seed '-1' does not fit"),
        ({"max_tokens": "many"}, "max_tokens 'many' does not fit"),
        ({"adapter": 3}, "adapter '3' does not fit"),
        ({"regex": "a+", "json_schema": {}}, "json_schema and regex: an answer has one form"),
        ({"choice": "yes"}, "choice 'yes'"),
    ],
)
def test_a_wrong_option_is_refused_before_sending(options: dict[str, object], named: str) -> None:
    with Client("127.0.0.1:9") as client, pytest.raises(InvalidRequest, match=named):
        client.generate("Hi", **options)  # type: ignore[arg-type]


def test_a_message_needs_role_and_content() -> None:
    with Client("127.0.0.1:9") as client, pytest.raises(InvalidRequest, match="role and content"):
        client.generate(messages=[{"role": "user"}])


def test_cancel_ends_the_stream_with_a_reason(fake: FakeDSpark, address: str) -> None:
    fake.hold = True
    with Client(address) as client:
        generation = client.generate("Hi")
        for _ in generation:
            if not fake.cancelled:
                assert generation.cancel()
        assert generation.finish_reason == "cancelled"
        assert not client.cancel("nobody")


async def test_leaving_a_stream_early_tells_the_server(fake: FakeDSpark, address: str) -> None:
    fake.hold = True
    async with AsyncClient(address) as client:
        generation = client.generate("Hi")
        stream = aiter(generation)
        await anext(stream)
        await generation.close()
    assert fake.cancelled == [generation.request_id]


def test_leaving_a_loop_early_tells_the_server(fake: FakeDSpark, address: str) -> None:
    fake.hold = True
    with Client(address) as client:
        generation = client.generate("Hi")
        for _ in generation:
            break
        generation.close()
    assert fake.cancelled == [generation.request_id]
