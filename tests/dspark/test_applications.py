"""Applications that a Serve does not run: one error for all commands, which names those it does."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask

from cluster.errors import ModelNotFound
from dspark.applications import LIST_METHOD
from dspark.async_client import AsyncClient
from dspark.cli import main
from dspark.client import Client
from tests.dspark.fake_server import FakeDSpark


class FakeServe(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Serve's proxy over some applications, none of them asked for by its name."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def service(self, details: Any) -> Any:
        if details.method == LIST_METHOD:
            answer = FieldMask(paths=self.names).SerializeToString()
            return grpc.unary_unary_rpc_method_handler(lambda request, context: answer)
        asked = dict(details.invocation_metadata).get("application", "")
        said = f"Application {asked!r} not found." if asked else "Application metadata not set."

        def refuse(request: Any, context: Any) -> Any:
            context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"{said} Ping /ray.serve.RayServeAPIService/ListApplications for available "
                "applications.",
            )

        return grpc.unary_unary_rpc_method_handler(refuse)


@pytest.fixture
def serve() -> FakeServe:
    return FakeServe(["other", "dspark"])


@pytest.fixture
def serve_address(serve: FakeServe) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((serve,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


@pytest.mark.parametrize("command", ["scheduling", "profile", "generate", "bench"])
def test_every_command_names_the_applications_there_are(
    command: str, serve_address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "Hi"}\n')
    more = {
        "generate": ["Hi"],
        "bench": ["--prompts", str(prompts), "--users", "1", "--duration", "1"],
    }
    argv = [command, *more.get(command, []), "--address", serve_address]
    assert main([*argv, "--application", "nope"]) == 2
    expected = "error: no application 'nope' there\nhint: one of dspark, other\n"
    assert capsys.readouterr().err.endswith(expected)
    assert main(argv) == 2
    expected = "error: the server runs several applications\nhint: name one of dspark, other\n"
    assert capsys.readouterr().err.endswith(expected)


async def test_the_async_client_says_the_same(serve_address: str, serve: FakeServe) -> None:
    async with AsyncClient(serve_address, application="nope") as client:
        with pytest.raises(ModelNotFound, match="one of dspark, other"):
            await client.get_model()
        with pytest.raises(ModelNotFound, match="one of dspark, other"):
            await client.generate("Hi").text()
        serve.names = []
        with pytest.raises(ModelNotFound, match="Serve runs none there"):
            await client.get_profile()


def test_a_missing_request_is_no_missing_application(fake: FakeDSpark, address: str) -> None:
    fake.error = ModelNotFound("no request 'x' here")
    with Client(address, application="a") as client, pytest.raises(ModelNotFound) as caught:
        _ = client.generate("Hi").text
    assert caught.value.message == "no request 'x' here"


@pytest.mark.parametrize("command", ["scheduling", "profile", "generate"])
def test_the_name_reaches_the_server(command: str, fake: FakeDSpark, address: str) -> None:
    argv = [command, *(["Hi"] if command == "generate" else []), "--address", address]
    assert main([*argv, "--application", "mine"]) == 0
    assert fake.metadata[-1]["application"] == "mine"


@pytest.mark.parametrize("name", ["a/b", "ö", "a\nb", "-a"])
def test_a_name_that_is_none(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scheduling", f"--application={name}"]) == 2
    assert "is no name of an application" in capsys.readouterr().err
