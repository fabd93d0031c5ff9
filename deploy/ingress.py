"""The router pool as a Serve deployment, and its gRPC methods: `dspark.v1` and `grpc.health.v1`.

Serve's proxy calls a method named like the RPC, whatever the service; its streams come as async
generators. A status is set on the call's context before raising; anything else that escapes
would reach the client as INTERNAL with a stack trace, so nothing else may.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from importlib.metadata import version
from typing import Any, Final, cast

import grpc
from grpc_health.v1 import health_pb2
from ray.serve.grpc_util import RayServegRPCContext

from cluster.api import dspark_v1_pb2 as pb
from cluster.config import Config
from cluster.errors import ConfigError, DSparkError, InvalidRequest, ModelNotFound
from cluster.fingerprint import drafter_fingerprint, folder_fingerprint
from cluster.priority import give_way
from cluster.scheduling_text import scheduling_text, with_values
from cluster.status import details_of
from deploy import replica
from deploy.requests import build_request, build_response, check_call
from deploy.text_model import TextModel, load_text_model
from router.admission import ModelLimits
from router.node import RouterNode
from router.request import Delta

logger = logging.getLogger(__name__)

SERVICE: Final = "dspark.v1.DSpark"
_WATCH_PERIOD_S: Final = 0.5
_Status = health_pb2.HealthCheckResponse


class Ingress:
    """One router replica behind Serve's gRPC proxy."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: Config, verifiers: Any, drafters: Any = None
    ) -> None:
        # The handles only tell Serve what belongs to the application: no call goes through them.
        self._config = config
        give_way()
        target, drafter = await asyncio.to_thread(replica.folders, config)
        self._text_model: TextModel = await asyncio.to_thread(load_text_model, target)
        self._drafter = drafter_fingerprint(drafter, config.drafter.lookup)
        limits = ModelLimits(
            vocab_size=self._text_model.vocab_size,
            max_model_len=min(config.model.max_model_len, self._text_model.max_positions),
            eos_ids=self._text_model.eos_ids,
            fingerprint=await asyncio.to_thread(folder_fingerprint, target),
        )
        self._node = RouterNode(
            member_id=replica.member_id("router"),
            config=config,
            directory=replica.directory(config),
            tokenizer=self._text_model.tokenizer,
            limits=limits,
            host=replica.data_host(config),
        )
        await self._node.start()

    # --- dspark.v1 ----------------------------------------------------------------------------

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Stream one request's deltas."""
        began_s = time.monotonic()
        ttft_s = 0.0
        with _statuses(grpc_context):
            self._check(grpc_context)
            router = self._config.router
            # A long prompt takes milliseconds to tokenize: not in the loop that drives the lanes.
            new_id = self._node.new_request_id()
            asked = await asyncio.to_thread(
                build_request, request, self._text_model, router, new_id
            )
            answer = cast("AsyncGenerator[Delta]", self._node.generate(asked))
            async with aclosing(answer) as deltas:
                async for delta in deltas:
                    now_s = time.monotonic() - began_s
                    if delta.token_ids and not ttft_s:
                        ttft_s = now_s
                    yield build_response(asked, delta, ttft_s=ttft_s, total_s=now_s)

    async def Cancel(  # noqa: N802
        self, request: pb.CancelRequest, grpc_context: RayServegRPCContext
    ) -> pb.CancelResponse:
        """Stop a request, whichever router has it."""
        with _statuses(grpc_context):
            self._check(grpc_context)
            return pb.CancelResponse(cancelled=await self._node.cancel(request.request_id))

    async def GetModel(  # noqa: N802
        self, request: pb.GetModelRequest, grpc_context: RayServegRPCContext
    ) -> pb.GetModelResponse:
        """Say what is served, and this router's counters."""
        with _statuses(grpc_context):
            self._check(grpc_context)
            return pb.GetModelResponse(
                model=self._config.model.target,
                drafter=self._drafter,
                max_model_len=self._node.limits.max_model_len,
                vocab_size=self._node.limits.vocab_size,
                verifiers=self._node.num_members("verifier"),
                drafters=self._node.num_members("drafter"),
                version=version("dspark-serve"),
                metrics=self._node.metrics(),
            )

    async def SetScheduling(  # noqa: N802
        self, request: pb.SetSchedulingRequest, grpc_context: RayServegRPCContext
    ) -> pb.SetSchedulingResponse:
        """Change how lanes decide, at all routers; without values: say how they do."""
        with _statuses(grpc_context):
            self._check(grpc_context)
            if request.values:
                try:
                    wanted = with_values(self._node.scheduling, request.values)
                    self._node.configure(wanted)
                except ConfigError as error:
                    raise InvalidRequest(error.message, hint=error.hint) from error
                logger.info("scheduling: %s", dict(request.values))
            return pb.SetSchedulingResponse(scheduling=scheduling_text(self._node.scheduling))

    async def GetProfile(  # noqa: N802
        self, request: pb.GetProfileRequest, grpc_context: RayServegRPCContext
    ) -> pb.GetProfileResponse:
        """Say what all routers know of the speed of their verifiers and drafters."""
        with _statuses(grpc_context):
            self._check(grpc_context)
            report = await self._node.profiles()
            return pb.GetProfileResponse(json=json.dumps(report, allow_nan=False))

    # --- grpc.health.v1 -----------------------------------------------------------------------

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, grpc_context: RayServegRPCContext
    ) -> health_pb2.HealthCheckResponse:
        """SERVING once this router has a lane, or knows another one that has."""
        with _statuses(grpc_context):
            if request.service not in ("", SERVICE):
                raise ModelNotFound(
                    f"no service {request.service!r}", hint=f"'{SERVICE}', or '' for all"
                )
            return _Status(status=self._status())

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status now, and again whenever it changes."""
        known, last = request.service in ("", SERVICE), None
        while True:
            status = self._status() if known else _Status.SERVICE_UNKNOWN
            if status != last:
                yield _Status(status=status)
            last = status
            await asyncio.sleep(_WATCH_PERIOD_S)

    # --- Serve --------------------------------------------------------------------------------

    def check_health(self) -> None:
        """Called by Serve; raising has the replica replaced."""
        self._node.check_health()

    async def __del__(self) -> None:
        """Called by Serve when the replica is asked to go."""
        with contextlib.suppress(AttributeError):  # a replica that did not finish starting
            await self._node.stop()

    def _status(self) -> Any:
        return _Status.SERVING if self._node.is_serving else _Status.NOT_SERVING

    def _check(self, context: RayServegRPCContext) -> None:
        cluster = self._config.cluster
        check_call(
            context.invocation_metadata(),
            token=cluster.auth_token,
            application=cluster.application,
        )


@contextmanager
def _statuses(context: RayServegRPCContext) -> Iterator[None]:
    """Errors of the tree become their status; a fault of ours is logged and named, no more."""
    try:
        yield
    except DSparkError as error:
        context.set_code(grpc.StatusCode[error.grpc_code])
        context.set_details(details_of(error))
        raise
    except Exception as error:
        logger.exception("a fault of ours")
        fault = DSparkError(f"internal error: {type(error).__name__}", hint="see the router's log")
        context.set_code(grpc.StatusCode.INTERNAL)
        context.set_details(details_of(fault))
        raise fault from None
