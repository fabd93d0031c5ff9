"""The asyncio client of a DSpark server, see `dspark.client`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from cluster.api import dspark_v1_pb2 as pb
from cluster.api import dspark_v1_pb2_grpc as rpc
from cluster.errors import DSparkError
from cluster.status import error_of
from dspark.applications import LIST_METHOD, names_none, names_of, no_application
from dspark.client import (
    CANCEL_TIMEOUT_S,
    CHANNEL_OPTIONS,
    DEFAULT_ADDRESS,
    Collected,
    checked_address,
    metadata_of,
)
from dspark.messages import (
    Chunk,
    Model,
    Options,
    build_request,
    model_of,
    profile_of,
    scheduling_request,
)


class AsyncGeneration(Collected):
    """One running request: iterate over its chunks, or await its whole ``text()``."""

    def __init__(
        self, client: AsyncClient, request: pb.GenerateRequest, timeout_s: float | None
    ) -> None:
        super().__init__(request.request_id)
        self._client = client
        self._call = client._stub.Generate(request, timeout=timeout_s, metadata=client._metadata)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        try:
            async for response in self._call:
                yield self._take(response)
        except grpc.RpcError as error:
            raise await self._client._typed(error) from error
        finally:
            if not self.finish_reason:
                await self.close()

    async def text(self) -> str:
        """Wait for the end and return the whole text.

        Raises:
            DSparkError: the request failed.
        """
        if not self.finish_reason:
            async for _ in self:
                pass
        return self.text_so_far

    async def cancel(self) -> bool:
        """Stop the request; its stream then ends with finish reason ``cancelled``."""
        return await self._client.cancel(self.request_id)

    async def close(self) -> None:
        """Give the request up without waiting for its end."""
        # A task that is cancelled while it reads has taken its call along already.
        if self._call.cancel() or self._call.cancelled():
            with contextlib.suppress(DSparkError):  # see Generation.close
                await self._client.cancel(self.request_id)


class AsyncClient:
    """`Client` for asyncio; same arguments. Create it inside the running loop."""

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
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub: Any = rpc.DSparkStub(self._channel)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        token_ids: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> AsyncGeneration:
        """Start a request; see `Client.generate`."""
        request = build_request(prompt, messages, token_ids, options)
        return AsyncGeneration(self, request, self._timeout_s)

    async def cancel(self, request_id: str) -> bool:
        """Stop a request by its id; False if no such request is running."""
        request = pb.CancelRequest(request_id=request_id)
        answer = await self._unary(self._stub.Cancel, request, CANCEL_TIMEOUT_S)
        return bool(answer.cancelled)

    async def get_model(self) -> Model:
        """Ask what is served."""
        answer = await self._unary(self._stub.GetModel, pb.GetModelRequest(), self._timeout_s)
        return model_of(answer)

    async def get_scheduling(self) -> dict[str, str]:
        """Ask how lanes decide now; see `Client.get_scheduling`."""
        return await self.set_scheduling({})

    async def set_scheduling(self, values: Mapping[str, str | float | bool]) -> dict[str, str]:
        """Change how lanes decide; see `Client.set_scheduling`."""
        request = scheduling_request(values)
        answer = await self._unary(self._stub.SetScheduling, request, self._timeout_s)
        return dict(answer.scheduling)

    async def get_profile(self) -> dict[str, Any]:
        """Ask what all routers know of their pools' speed; see `Client.get_profile`."""
        request = pb.GetProfileRequest()
        return profile_of(await self._unary(self._stub.GetProfile, request, self._timeout_s))

    async def close(self) -> None:
        """Close the connection; running requests end."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.close()

    async def _unary(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        try:
            return await method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise await self._typed(error) from error

    async def _typed(self, error: Any) -> DSparkError:
        """The error of our tree that a failed call stands for."""
        if not names_none(error):
            return error_of(error.code().name, error.details(), self.address)
        names: list[str] = []
        with contextlib.suppress(grpc.RpcError):
            ask = self._channel.unary_unary(LIST_METHOD, response_deserializer=names_of)
            names = await ask(b"", timeout=CANCEL_TIMEOUT_S)
        return no_application(self._application, names)
