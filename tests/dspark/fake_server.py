"""A gRPC server that speaks `dspark.v1` from a script: the client's tests need no model, no Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc

from cluster.api import dspark_v1_pb2 as pb
from cluster.api import dspark_v1_pb2_grpc as rpc
from cluster.errors import DSparkError, InvalidRequest
from cluster.status import details_of

WORDS = ("The ", "quick ", "fox")
USAGE = pb.Usage(completion_tokens=3, rounds=2, proposed=6, verified=2, accepted=1, seed=7)


class FakeDSpark(rpc.DSparkServicer):  # type: ignore[misc]
    """Answers `WORDS`, or the error that it was given; remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.cancelled: list[str] = []
        self.error: DSparkError | None = None
        self.fail_after = 0
        """Words sent before ``error``."""
        self.hold = False
        """Send one word, then wait for a cancel."""
        self.pause_s = 0.0
        """Before each word."""
        self.metrics = {"num_steps": 2.0}
        self.profile = '{"router": "r", "verifiers": [], "drafters": []}'
        self.scheduling = {"policy": "adaptive", "gate_drafts": "true"}
        self._cancel = threading.Event()

    def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: Any
    ) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        for i, word in enumerate(WORDS):
            if self.error is not None and i == self.fail_after:
                code = grpc.StatusCode[self.error.grpc_code]
                context.abort(code, details_of(self.error))
            time.sleep(self.pause_s)
            last = i == len(WORDS) - 1
            yield pb.GenerateResponse(
                text=word,
                token_ids=[i],
                logprobs=[-0.5] if request.sampling.logprobs else [],
                finish_reason="stop" if last else "",
                usage=USAGE if last else None,
            )
            if self.hold:
                self._cancel.wait(10)
                yield pb.GenerateResponse(finish_reason="cancelled", usage=pb.Usage())
                return

    def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:  # noqa: N802
        self.cancelled.append(request.request_id)
        self._cancel.set()
        return pb.CancelResponse(
            cancelled=any(r.request_id == request.request_id for r in self.requests)
        )

    def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:  # noqa: N802
        return pb.GetModelResponse(model="tiny", vocab_size=3, metrics=self.metrics)

    def SetScheduling(  # noqa: N802
        self, request: pb.SetSchedulingRequest, context: Any
    ) -> pb.SetSchedulingResponse:
        self.metadata.append(dict(context.invocation_metadata()))
        for name in request.values.keys() - self.scheduling.keys():
            error = InvalidRequest(f"router.scheduling.{name}: unknown key")
            context.abort(grpc.StatusCode[error.grpc_code], details_of(error))
        self.scheduling |= request.values
        return pb.SetSchedulingResponse(scheduling=self.scheduling)

    def GetProfile(self, request: pb.GetProfileRequest, context: Any) -> pb.GetProfileResponse:  # noqa: N802
        self.metadata.append(dict(context.invocation_metadata()))
        return pb.GetProfileResponse(json=self.profile)


@contextmanager
def running(servicer: FakeDSpark) -> Iterator[str]:
    """Serve on a free loopback port; yields the address."""
    server = grpc.server(futures.ThreadPoolExecutor(8))
    rpc.add_DSparkServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()
