"""The client of a DSpark server; gRPC and nothing heavier behind it.

`dspark.async_client` holds its twin for asyncio.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, Unpack

import grpc

from cluster.api import dspark_v1_pb2 as pb
from cluster.api import dspark_v1_pb2_grpc as rpc
from cluster.application_name import check_application
from cluster.environment import auth_token
from cluster.errors import ConfigError, DSparkError
from cluster.status import error_of
from cluster.token import check_token
from dspark.applications import LIST_METHOD, names_none, names_of, no_application
from dspark.messages import (
    Chunk,
    Model,
    Options,
    Usage,
    build_request,
    chunk_of,
    model_of,
    profile_of,
    scheduling_request,
)

DEFAULT_ADDRESS: Final = "127.0.0.1:9000"
CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.keepalive_time_ms", 30_000),
)
_ADDRESS: Final = re.compile(r"(?:[^\s:/\[\]]+|\[[0-9A-Fa-f:.%]+\]):([0-9]{1,5})", re.ASCII)
_OWN_NAMES: Final = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:")
CANCEL_TIMEOUT_S: Final = 5.0
"""Of a cancel, which nobody should have to wait for."""


class Collected:
    """What has arrived so far of one request."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.finish_reason = ""
        self.usage: Usage | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self._texts: list[str] = []

    @property
    def text_so_far(self) -> str:
        """All text that has arrived."""
        return "".join(self._texts)

    def _take(self, response: pb.GenerateResponse) -> Chunk:
        chunk = chunk_of(response)
        self._texts.append(chunk.text)
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        if chunk.finish_reason:
            self.finish_reason, self.usage = chunk.finish_reason, chunk.usage
        return chunk


class Generation(Collected):
    """One running request: iterate over its chunks, or take its whole ``text``."""

    def __init__(
        self, client: Client, request: pb.GenerateRequest, timeout_s: float | None
    ) -> None:
        super().__init__(request.request_id)
        self._client = client
        self._call = client._stub.Generate(request, timeout=timeout_s, metadata=client._metadata)

    def __iter__(self) -> Iterator[Chunk]:
        try:
            for response in self._call:
                yield self._take(response)
        except grpc.RpcError as error:
            raise self._client._typed(error) from error
        finally:
            if not self.finish_reason:
                self.close()

    @property
    def text(self) -> str:
        """The whole text; waits for the end.

        Raises:
            DSparkError: the request failed.
        """
        if not self.finish_reason:
            for _ in self:
                pass
        return self.text_so_far

    def cancel(self) -> bool:
        """Stop the request; its stream then ends with finish reason ``cancelled``.

        Returns:
            False if it was not running any more.
        """
        return self._client.cancel(self.request_id)

    def close(self) -> None:
        """Give the request up without waiting for its end."""
        if self._call.cancel():
            # The proxy may lose a stream's cancellation, so that the server is told by a call, too.
            with contextlib.suppress(DSparkError):
                self._client.cancel(self.request_id)


class Client:
    """A connection to a DSpark server.

    Args:
        address: ``host:port`` of the server's gRPC port.
        token: the cluster's token; default: DSPARK_TOKEN.
        application: name of the Serve application, needed where a Ray cluster runs several.
        timeout_s: gRPC deadline of a whole call; None for none.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        token: str | None = None,
        application: str = "",
        timeout_s: float | None = None,
    ) -> None:
        self.address = checked_address(address)
        self._timeout_s = timeout_s
        self._application = application
        self._metadata = metadata_of(token, application)
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub: Any = rpc.DSparkStub(self._channel)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        token_ids: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> Generation:
        """Start a request from plain text, chat messages (``role``, ``content``) or token ids.

        `Options` lists the options. An answer of a given form::

            client.generate("Rate it:", choice=["good", "bad"]).text
            client.generate(messages=messages, json_schema={"type": "object"}).text

        Errors of the server are raised while iterating.

        Raises:
            InvalidRequest: the arguments make no request.
        """
        request = build_request(prompt, messages, token_ids, options)
        return Generation(self, request, self._timeout_s)

    def cancel(self, request_id: str) -> bool:
        """Stop a request by its id; False if no such request is running."""
        request = pb.CancelRequest(request_id=request_id)
        return bool(self._unary(self._stub.Cancel, request, CANCEL_TIMEOUT_S).cancelled)

    def get_model(self) -> Model:
        """Ask what is served."""
        return model_of(self._unary(self._stub.GetModel, pb.GetModelRequest(), self._timeout_s))

    def get_scheduling(self) -> dict[str, str]:
        """Ask how lanes decide now: the values of ``router.scheduling`` by name."""
        return self.set_scheduling({})

    def set_scheduling(self, values: Mapping[str, str | float | bool]) -> dict[str, str]:
        """Change how lanes decide, for all routers and while they serve; what is not named stays.

        Returns:
            All values that are in force now.

        Raises:
            InvalidRequest: no such name, or a value that it cannot have.
        """
        request = scheduling_request(values)
        answer = self._unary(self._stub.SetScheduling, request, self._timeout_s)
        return dict(answer.scheduling)

    def get_profile(self) -> dict[str, Any]:
        """Ask what all routers know of the speed of their verifiers and drafters.

        Returns:
            ``verifiers`` and ``drafters``, each with the ``router`` that tells of it; ``routers``,
            who told; ``unanswered``, the routers that did not, and why; ``untold``, the live
            verifiers that nobody told of; as `GetProfileResponse` says.
        """
        request = pb.GetProfileRequest()
        return profile_of(self._unary(self._stub.GetProfile, request, self._timeout_s))

    def close(self) -> None:
        """Close the connection; running requests end."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def _unary(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._typed(error) from error

    def _typed(self, error: Any) -> DSparkError:
        """The error of our tree that a failed call stands for."""
        if not names_none(error):
            return error_of(error.code().name, error.details(), self.address)
        names: list[str] = []
        with contextlib.suppress(grpc.RpcError):
            ask = self._channel.unary_unary(LIST_METHOD, response_deserializer=names_of)
            names = ask(b"", timeout=CANCEL_TIMEOUT_S)
        return no_application(self._application, names)


def checked_address(address: str) -> str:
    """The address, if gRPC does not read another one out of it: it wraps large ports around, and
    takes 443 where there is none.

    Raises:
        ConfigError: not HOST:PORT, nor one of gRPC's own names, as unix:PATH.
    """
    if address.startswith(_OWN_NAMES):
        return address
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[1]) < 1 << 16:
        raise ConfigError(
            f"no address: {address[:128]!r}",
            hint="HOST:PORT, the port from 1 to 65535, without http://",
        )
    return address


def metadata_of(token: str | None, application: str) -> tuple[tuple[str, str], ...]:
    """What every call carries: the application's name, and the token of the caller or else of the
    environment.

    Raises:
        ConfigError: a token or name that no call can carry.
    """
    if application:
        check_application(application)
    secret = auth_token() if token is None else token
    check_token(secret)
    pairs = [("application", application)] if application else []
    return tuple(pairs + ([("authorization", f"Bearer {secret}")] if secret else []))
