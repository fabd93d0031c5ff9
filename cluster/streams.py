"""Frame streams: one long-lived bidirectional `grpc.aio` stream per pair of members.

Both ends say `Hello` first: the dialling end, then, once its token is found right, the serving
end (so a stranger learns nothing). From then on either end sends any frame at any time.

A frame that breaks the wire rules is answered with a fatal `Refused`, counted, and ends its stream
and no other. A dead peer ends `recv` with `Unavailable`: at once if its socket closes, within
`_KEEPALIVE_S` + `_KEEPALIVE_TIMEOUT_S` if its host has vanished.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
from collections.abc import Callable, Coroutine
from typing import Any, Final

import grpc

from cluster.errors import (
    AuthError,
    DSparkError,
    FrameError,
    Overloaded,
    ProtocolMismatch,
    Unavailable,
    error_for,
)
from cluster.frame_stream import FrameStream, StreamCounters, StreamLimits, describe, refusal
from cluster.timeouts import require_timeout
from cluster.wire import MAX_FRAME_BYTES, Hello, Refused, decode, encode

__all__ = [
    "ROLES",
    "DataServer",
    "FrameStream",
    "OnStream",
    "StreamCounters",
    "StreamLimits",
    "check_models",
    "connect",
]

logger = logging.getLogger(__name__)

_SERVICE: Final = "dspark.data.v1.Frames"
_METHOD: Final = "Stream"
_KEEPALIVE_S: Final = 10.0
_KEEPALIVE_TIMEOUT_S: Final = 5.0
_ADDRESS: Final = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")

ROLES: Final = frozenset({"router", "verifier", "drafter", "probe"})

_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    # A frame is checked against MAX_FRAME_BYTES by the codec; the slack lets that check, with its
    # clear message at the sender, be the one that fires.
    ("grpc.max_send_message_length", MAX_FRAME_BYTES + (1 << 16)),
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES + (1 << 16)),
    ("grpc.keepalive_time_ms", int(_KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(_KEEPALIVE_TIMEOUT_S * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", int(_KEEPALIVE_S * 500)),
    ("grpc.http2.max_ping_strikes", 0),
)
_CHANNEL_OPTIONS: Final = (
    *_OPTIONS,
    # One connection per stream: no flow control shared between peers' streams, and no reconnect
    # back-off inherited from an earlier failure.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
)
_SERVER_OPTIONS: Final = (*_OPTIONS, ("grpc.so_reuseport", 0))


OnStream = Callable[[FrameStream], Coroutine[Any, Any, None]]


async def connect(
    address: str,
    hello: Hello,
    *,
    expect_role: str,
    timeout_s: float,
    counters: StreamCounters | None = None,
    limits: StreamLimits | None = None,
) -> FrameStream:
    """Dial a member and exchange Hellos.

    Args:
        address: ``host:port``.
        hello: our own.
        expect_role: the role that the peer must have.
        timeout_s: of the whole exchange.

    Raises:
        ConfigError: ``timeout_s`` <= 0.
        FrameError: not an address, or a malformed answer.
        AuthError: the peer refused our token, or has another one.
        ProtocolMismatch: another protocol version or role.
        Unavailable: nobody there, or no answer in time.
    """
    require_timeout("timeout_s", timeout_s)
    if not _ADDRESS.fullmatch(address):
        raise FrameError(f"{address[:128]!r} is not an address", hint="expected host:port")
    channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    call = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")()
    try:
        async with asyncio.timeout(timeout_s):
            await call.write(encode(hello))
            peer = _check_hello(await call.read(), hello, frozenset({expect_role}))
    except BaseException as error:
        call.cancel()
        await channel.close()
        if isinstance(error, DSparkError) or not isinstance(error, Exception):
            raise
        why = "no answer in time" if isinstance(error, TimeoutError) else describe(error)
        raise Unavailable(f"cannot reach {expect_role} at {address}: {why}") from error

    async def end_call() -> None:
        call.cancel()
        await channel.close()

    return FrameStream(
        call,
        peer,
        counters=counters or StreamCounters(),
        limits=limits or StreamLimits(),
        hang_up=call.done_writing,
        end_call=end_call,
    )


class DataServer:
    """Serves frame streams: one ``on_stream`` coroutine per accepted stream, which ends with it.

    ``on_stream`` may return or raise at any time; the stream is closed for it. A `DSparkError` that
    it raises goes to the peer as a fatal `Refused`.
    """

    def __init__(
        self,
        *,
        hello: Hello,
        on_stream: OnStream,
        host: str = "127.0.0.1",
        port: int = 0,
        accept_roles: frozenset[str] = ROLES,
        max_streams: int = 1024,
        handshake_timeout_s: float = 5.0,
        limits: StreamLimits | None = None,
    ) -> None:
        self.counters = StreamCounters()
        self._hello = hello
        self._on_stream = on_stream
        self._host = host
        self._port = port
        self._accept_roles = accept_roles
        self._max_streams = max_streams
        self._handshake_timeout_s = require_timeout("handshake_timeout_s", handshake_timeout_s)
        self._limits = limits or StreamLimits()
        self._server: Any = None
        self._streams: set[FrameStream] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """``host:port`` to dial; only after `start`."""
        return f"{self._host}:{self._port}"

    async def start(self) -> None:
        """Bind and accept streams.

        Raises:
            Unavailable: the address cannot be bound.
        """
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        method = grpc.stream_stream_rpc_method_handler(self._handle)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: method}),)
        )
        try:
            self._port = server.add_insecure_port(f"{self._host}:{self._port}")
        except RuntimeError as error:
            raise Unavailable(f"cannot listen on {self._host}:{self._port}: {error}") from error
        await server.start()
        self._server = server

    async def stop(self, grace_s: float = 1.0) -> None:
        """End all streams, giving their coroutines ``grace_s`` to finish, and stop listening."""
        server, self._server = self._server, None
        if server is None:
            return
        await asyncio.gather(*(stream.close() for stream in tuple(self._streams)))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=max(grace_s, 0.0))
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await server.stop(None)

    async def _handle(self, _: Any, context: Any) -> None:
        """One gRPC call. gRPC cancels this coroutine when the peer goes; the stream outlives that
        just long enough for its owner to hear of it and clean up."""
        stream: FrameStream | None = None
        try:
            stream = await self._greet(context)
            if stream is None:
                return
            task = asyncio.create_task(self._run(stream), name="frame stream")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if stream is not None:
                stream.abandon("the peer went away")
            raise

    async def _greet(self, context: Any) -> FrameStream | None:
        """Exchange Hellos, or refuse and return None."""
        try:
            async with asyncio.timeout(self._handshake_timeout_s):
                peer = _check_hello(await context.read(), self._hello, self._accept_roles)
                if len(self._streams) >= self._max_streams:
                    raise Overloaded(f"{self._max_streams} streams are open already")
                await context.write(encode(self._hello))
        except DSparkError as error:
            self.counters.refused += 1
            logger.warning("refused a stream: %s", error)
            await context.write(encode(refusal(error, fatal=True)))
            return None
        except TimeoutError:
            self.counters.refused += 1
            return None
        return FrameStream(context, peer, counters=self.counters, limits=self._limits)

    async def _run(self, stream: FrameStream) -> None:
        self._streams.add(stream)
        try:
            await self._on_stream(stream)
        except Unavailable:
            pass  # the stream is over: the normal end of a coroutine that reads it
        except DSparkError as error:
            if not stream.closed:  # else it is a malformed frame, which was refused already
                await stream.refuse(error)
        except Exception:
            logger.exception("stream of %s failed", stream.peer.member_id)
            await stream.refuse(DSparkError("internal error", hint="see the log of this member"))
        finally:
            self._streams.discard(stream)
            await stream.close()


def check_models(ours: Hello, theirs: Hello) -> None:
    """Refuse a peer that holds another target model or drafter; an empty fingerprint is unknown.

    Raises:
        ProtocolMismatch: both ends name one and they differ.
    """
    for what in ("model", "drafter"):
        mine, other = getattr(ours, what), getattr(theirs, what)
        if mine and other and mine != other:
            raise ProtocolMismatch(
                f"{theirs.role} {theirs.member_id!r} holds {what} {other[:16]}, not {mine[:16]}",
                hint="all pools of one application must load the same checkpoints",
            )


def _check_hello(data: Any, ours: Hello, roles: frozenset[str]) -> Hello:
    """Judge the first frame of a peer.

    Raises:
        Unavailable: the call ended before it.
        DSparkError: the peer's own refusal, rebuilt.
        FrameError, ProtocolMismatch, AuthError: as `connect`.
    """
    if data is grpc.aio.EOF:
        raise Unavailable("the peer hung up before its Hello")
    frame = decode(data)
    if isinstance(frame, Refused):
        raise error_for(frame.code, frame.message)
    if not isinstance(frame, Hello):
        raise FrameError(f"first frame is {type(frame).__name__}, expected Hello")
    if not hmac.compare_digest(frame.token.encode(), ours.token.encode()):
        raise AuthError(
            f"{frame.role} {frame.member_id!r} has a wrong cluster token",
            hint="set the same DSPARK_TOKEN on every node",
        )
    if frame.role not in roles:
        raise ProtocolMismatch(
            f"peer {frame.member_id!r} is a {frame.role!r}, expected {' or '.join(sorted(roles))}"
        )
    return frame
