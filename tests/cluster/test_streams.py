"""Frame streams over real loopback sockets: handshake, bounds, hostile peers, ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import numpy as np
import pytest

from cluster import wire
from cluster.errors import (
    AuthError,
    ConfigError,
    DSparkError,
    FrameError,
    LeaseError,
    Overloaded,
    ProtocolMismatch,
    Unavailable,
)
from cluster.streams import DataServer, FrameStream, StreamLimits, check_models, connect
from cluster.wire import Hello, Ping, Pong, Refused, Release
from tests.frames import make_hello
from tests.waiting import eventually

ROUTER = make_hello("router", "router-0", token="secret")
VERIFIER = make_hello("verifier", "verifier-0", token="secret")


@dataclass
class Echo:
    """Answers every Ping; remembers its streams and how they ended."""

    streams: list[FrameStream] = field(default_factory=list)
    ends: list[Exception] = field(default_factory=list)

    async def __call__(self, stream: FrameStream) -> None:
        self.streams.append(stream)
        try:
            while True:
                frame = await stream.recv()
                if isinstance(frame, Ping):
                    await stream.send(Pong(nonce=frame.nonce))
        except Exception as error:
            self.ends.append(error)
            raise


@pytest.fixture(autouse=True)
async def no_leaked_tasks() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    await eventually(lambda: not (ours() - before))


def ours() -> set[asyncio.Task[object]]:
    """Tasks of this project that still run (gRPC keeps some of its own)."""
    names = ("frames ", "frame stream")
    return {task for task in asyncio.all_tasks() if task.get_name().startswith(names)}


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
async def server(echo: Echo) -> AsyncIterator[DataServer]:
    server = DataServer(hello=VERIFIER, on_stream=echo)
    await server.start()
    yield server
    await server.stop()


async def dial(server: DataServer, hello: Hello = ROUTER, **changes: object) -> FrameStream:
    options: dict[str, object] = {"expect_role": "verifier", "timeout_s": 5.0} | changes
    return await connect(server.address, hello, **options)  # type: ignore[arg-type]


async def ping(stream: FrameStream, nonce: int = 1) -> None:
    await stream.send(Ping(nonce=nonce))
    assert await stream.recv() == Pong(nonce=nonce)


# --- handshake ---------------------------------------------------------------------------------


async def test_hellos_cross_and_frames_flow(server: DataServer, echo: Echo) -> None:
    stream = await dial(server)
    assert stream.peer == VERIFIER
    for nonce in range(50):
        await ping(stream, nonce)
    assert echo.streams[0].peer == ROUTER
    assert stream.counters.frames_out == stream.counters.frames_in == 50
    assert server.counters.bytes_in == stream.counters.bytes_out > 0
    await stream.close()
    await eventually(lambda: echo.ends)
    assert isinstance(echo.ends[0], Unavailable)


async def test_wrong_token_is_refused_before_the_server_says_anything(server: DataServer) -> None:
    with pytest.raises(AuthError, match="DSPARK_TOKEN"):
        await dial(server, make_hello(token="wrong"))
    with pytest.raises(AuthError):
        await dial(server, make_hello(token=""))
    assert server.counters.refused == 2


async def test_a_server_with_another_token_is_refused_by_the_client() -> None:
    async def impostor(_: object, context: object) -> None:
        """Accepts any token and answers with its own."""
        await context.read()  # type: ignore[attr-defined]
        hello = make_hello("verifier", "impostor", token="guess")
        await context.write(wire.encode(hello))  # type: ignore[attr-defined]

    async with raw_server(impostor) as address:
        with pytest.raises(AuthError, match="impostor"):
            await connect(address, ROUTER, expect_role="verifier", timeout_s=5.0)


async def test_tokens_beyond_ascii_compare() -> None:
    hello = make_hello("verifier", "v", token="gehäim")
    server = DataServer(hello=hello, on_stream=Echo())
    await server.start()
    stream = await dial(server, make_hello(token="gehäim"))
    await stream.close()
    await server.stop()


async def test_roles_are_checked_at_both_ends(server: DataServer) -> None:
    with pytest.raises(ProtocolMismatch, match="expected drafter"):
        await dial(server, expect_role="drafter")
    with pytest.raises(ProtocolMismatch, match="stranger"):
        await dial(server, make_hello("stranger", token="secret"))
    only_routers = DataServer(hello=VERIFIER, on_stream=Echo(), accept_roles=frozenset({"router"}))
    await only_routers.start()
    with pytest.raises(ProtocolMismatch, match="expected router"):
        await dial(only_routers, make_hello("drafter", token="secret"))
    await only_routers.stop()


async def test_the_first_frame_must_be_a_hello_of_this_version(server: DataServer) -> None:
    async with raw_call(server.address) as call:
        await call.write(wire.encode(Ping(nonce=1)))
        refusal = wire.decode(await call.read())
    assert isinstance(refusal, Refused)
    assert (refusal.code, refusal.fatal) == ("FrameError", True)
    async with raw_call(server.address) as call:
        other = bytearray(wire.encode(ROUTER))
        assert other[1] == wire.PROTOCOL_VERSION
        other[1] += 1
        await call.write(bytes(other))
        refusal = wire.decode(await call.read())
    assert isinstance(refusal, Refused)
    assert refusal.code == "ProtocolMismatch"


async def test_too_many_streams(echo: Echo) -> None:
    server = DataServer(hello=VERIFIER, on_stream=echo, max_streams=1)
    await server.start()
    first = await dial(server)
    with pytest.raises(Overloaded):
        await dial(server)
    await ping(first)
    await first.close()
    await eventually(lambda: echo.ends)
    second = await dial(server)
    await second.close()
    await server.stop()


async def test_a_silent_peer_is_dropped_in_time(server: DataServer) -> None:
    impatient = DataServer(hello=VERIFIER, on_stream=Echo(), handshake_timeout_s=0.1)
    await impatient.start()
    async with raw_call(impatient.address) as call:
        assert await call.read() is grpc.aio.EOF
    assert impatient.counters.refused == 1
    await impatient.stop()

    async def mute(_: object, context: object) -> None:
        await asyncio.sleep(30)

    async with raw_server(mute) as address:
        with pytest.raises(Unavailable, match="no answer in time"):
            await connect(address, ROUTER, expect_role="verifier", timeout_s=0.2)


async def test_nobody_there() -> None:
    with pytest.raises(Unavailable, match="cannot reach verifier"):
        await connect("127.0.0.1:1", ROUTER, expect_role="verifier", timeout_s=5.0)


@pytest.mark.parametrize("address", ["", "nowhere", "unix:/tmp/x", "a b:1", "dns:///h:1", "h:"])
async def test_not_an_address(address: str) -> None:
    with pytest.raises(FrameError, match="host:port"):
        await connect(address, ROUTER, expect_role="verifier", timeout_s=5.0)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("inf")])
async def test_no_timeout_is_refused(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="timeout_s"):
        await connect("127.0.0.1:1", ROUTER, expect_role="verifier", timeout_s=timeout_s)
    with pytest.raises(ConfigError, match="handshake_timeout_s"):
        DataServer(hello=VERIFIER, on_stream=Echo(), handshake_timeout_s=timeout_s)


async def test_a_taken_port(server: DataServer) -> None:
    port = int(server.address.rsplit(":", 1)[1])
    other = DataServer(hello=VERIFIER, on_stream=Echo(), port=port)
    with pytest.raises(Unavailable, match="cannot listen"):
        await other.start()


def test_models_must_match_where_both_are_known() -> None:
    ours = make_hello(model="m1", drafter="d1")
    check_models(ours, make_hello("verifier", "v", model="m1", drafter="d1"))
    check_models(ours, make_hello("verifier", "v"))
    check_models(make_hello(), make_hello("verifier", "v", model="m2"))
    with pytest.raises(ProtocolMismatch, match="model m2"):
        check_models(ours, make_hello("verifier", "v", model="m2"))
    with pytest.raises(ProtocolMismatch, match="drafter d2"):
        check_models(ours, make_hello("verifier", "v", drafter="d2"))


# --- hostile and broken peers ------------------------------------------------------------------


async def test_a_hostile_frame_ends_its_stream_and_no_other(server: DataServer, echo: Echo) -> None:
    good = await dial(server)
    await ping(good)
    async with raw_call(server.address) as call:
        await call.write(wire.encode(make_hello("router", "evil", token="secret")))
        assert isinstance(wire.decode(await call.read()), Hello)
        await call.write(b"\xc1 junk")
        refusal = wire.decode(await call.read())
        assert await call.read() is grpc.aio.EOF
    assert isinstance(refusal, Refused)
    assert (refusal.code, refusal.fatal) == ("FrameError", True)
    assert server.counters.refused == 1
    assert [type(end) for end in echo.ends] == [FrameError]
    await ping(good)
    await good.close()


async def test_a_hostile_server_frame_raises_and_ends_the_client(server: DataServer) -> None:
    async def evil(_: object, context: object) -> None:
        await context.read()  # type: ignore[attr-defined]
        await context.write(wire.encode(VERIFIER))  # type: ignore[attr-defined]
        await context.write(b"")  # type: ignore[attr-defined]
        await context.read()  # type: ignore[attr-defined]

    async with raw_server(evil) as address:
        stream = await connect(address, ROUTER, expect_role="verifier", timeout_s=5.0)
        with pytest.raises(FrameError):
            await stream.recv()
        with pytest.raises(Unavailable, match="refused a frame"):
            await stream.recv()
        assert stream.counters.refused == 1
        await stream.close()


async def test_refusals_cross_typed(server: DataServer, echo: Echo) -> None:
    stream = await dial(server)
    await ping(stream)
    await echo.streams[0].refuse(LeaseError("not yours", hint="ask again"), fatal=False)
    refusal = await stream.recv()
    assert refusal == Refused(code="LeaseError", message="not yours (ask again)", fatal=False)
    await ping(stream)
    await echo.streams[0].refuse(FrameError("x" * 9000))
    refusal = await stream.recv()
    assert isinstance(refusal, Refused)
    assert len(refusal.message) == 4096
    with pytest.raises(Unavailable):
        await stream.recv()
    await stream.close()


@pytest.mark.parametrize("error", [LeaseError("mine"), ZeroDivisionError("bug")])
async def test_an_error_of_the_coroutine_reaches_the_peer(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(stream: FrameStream) -> None:
        raise error

    server = DataServer(hello=VERIFIER, on_stream=fails)
    await server.start()
    stream = await dial(server)
    refusal = await stream.recv()
    assert isinstance(refusal, Refused)
    assert refusal.fatal
    assert refusal.code == ("LeaseError" if isinstance(error, LeaseError) else "DSparkError")
    assert "bug" not in refusal.message  # internals stay in our log
    assert ("ZeroDivisionError" in caplog.text) == isinstance(error, ZeroDivisionError)
    await stream.close()
    await server.stop()


# --- bounds ------------------------------------------------------------------------------------


async def test_a_peer_that_reads_nothing_fills_a_bounded_queue() -> None:
    gate = asyncio.Event()

    async def deaf(stream: FrameStream) -> None:
        await gate.wait()

    small = StreamLimits(max_frames=4, max_bytes=1 << 20, send_timeout_s=0.2)
    server = DataServer(hello=VERIFIER, on_stream=deaf, limits=small)
    await server.start()
    stream = await dial(server, limits=small)
    frame = Release(lane_id="r", rid=np.zeros(wire.MAX_ROWS, np.int64))  # 128 KiB

    async def send_many() -> None:
        for _ in range(2000):  # what the two ends and the kernel may hold is far less
            await stream.send(frame)

    with pytest.raises(Unavailable, match="took no frame"):
        await send_many()
    assert not stream.try_send(frame)
    assert stream.counters.dropped == 1
    gate.set()
    await stream.close()
    await server.stop()


async def test_a_frame_of_the_largest_size_passes(server: DataServer) -> None:
    got: list[wire.Frame] = []

    async def take(stream: FrameStream) -> None:
        got.append(await stream.recv())
        await stream.send(Pong(nonce=1))

    taker = DataServer(hello=VERIFIER, on_stream=take)
    await taker.start()
    stream = await dial(taker)
    rows = wire.MAX_FRAME_BYTES // 4096 - 1
    commit = wire.Commit(
        lane_id="r",
        rid=np.zeros(1, np.int64),
        epoch=np.zeros(1, np.int32),
        first_position=np.zeros(1, np.int32),
        num_rows=np.array([rows], np.int32),
        digest=np.zeros(1, np.uint64),
        want_draft=np.zeros(1, np.uint8),
        ids=np.zeros(rows, np.int32),
        features=np.zeros((rows, 1000), np.float32),
    )
    await stream.send(commit)
    assert await stream.recv() == Pong(nonce=1)
    assert got == [commit]
    too_large = wire.Emit(
        request_id="a",
        loan=1,
        seq=0,
        text="é" * (wire.MAX_FRAME_BYTES // 2),
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        finish="",
        error_code="",
        error_message="",
        num_rounds=0,
        num_proposed=0,
        num_verified=0,
        num_accepted=0,
    )
    with pytest.raises(FrameError, match="exceeds"):  # at the sender, before anything is sent
        await stream.send(too_large)
    await stream.close()
    await taker.stop()


async def test_cancelling_recv_and_send_loses_nothing(server: DataServer) -> None:
    stream = await dial(server)
    for nonce in range(20):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await stream.recv()
        await ping(stream, nonce)
    await stream.close()


async def test_concurrent_senders(server: DataServer) -> None:
    stream = await dial(server)
    await asyncio.gather(*(stream.send(Ping(nonce=n)) for n in range(200)))
    answers = [await stream.recv() for _ in range(200)]
    assert answers == [Pong(nonce=n) for n in range(200)]
    await stream.close()


# --- ends --------------------------------------------------------------------------------------


async def test_close_flushes_and_is_idempotent(server: DataServer) -> None:
    got: list[wire.Frame] = []
    ended = asyncio.Event()

    async def collect(stream: FrameStream) -> None:
        with contextlib.suppress(Unavailable):
            while True:
                got.append(await stream.recv())
        ended.set()

    collector = DataServer(hello=VERIFIER, on_stream=collect)
    await collector.start()
    stream = await dial(collector)
    for nonce in range(100):
        await stream.send(Ping(nonce=nonce))
    await stream.close()
    await stream.close()
    await ended.wait()
    assert got == [Ping(nonce=nonce) for nonce in range(100)]
    assert stream.closed
    with pytest.raises(Unavailable):
        await stream.send(Ping(nonce=1))
    assert not stream.try_send(Ping(nonce=1))
    with pytest.raises(Unavailable):
        await stream.recv()
    await collector.stop()


async def test_stopping_the_server_ends_its_streams(server: DataServer, echo: Echo) -> None:
    streams = [await dial(server, make_hello(member_id=f"r{i}", token="secret")) for i in range(3)]
    await ping(streams[0])
    await server.stop()
    for stream in streams:
        with pytest.raises(Unavailable):
            async with asyncio.timeout(5):
                await stream.recv()
        await stream.close()
    assert len(echo.ends) == 3
    await server.stop()  # again is fine


async def test_a_cancelled_client_is_noticed(server: DataServer, echo: Echo) -> None:
    async with raw_call(server.address) as call:
        await call.write(wire.encode(ROUTER))
        await call.read()
        call.cancel()
        await eventually(lambda: echo.ends)
    assert isinstance(echo.ends[0], DSparkError)
    assert server.counters.refused == 0


CHILD = textwrap.dedent(
    """
    import asyncio
    from cluster.streams import DataServer
    from tests.frames import make_hello

    async def hold(stream):
        while True:
            await stream.recv()

    async def main():
        hello = make_hello("verifier", "child", token="secret")
        server = DataServer(hello=hello, on_stream=hold)
        await server.start()
        print(server.address, flush=True)
        await asyncio.sleep(60)

    asyncio.run(main())
    """
)


async def test_a_killed_peer_surfaces_promptly() -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    address = (await child.stdout.readline()).decode().strip()
    stream = await connect(address, ROUTER, expect_role="verifier", timeout_s=20.0)
    waiting = asyncio.create_task(stream.recv())
    await asyncio.sleep(0.05)
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(Unavailable, match="child"):
        async with asyncio.timeout(5):
            await waiting
    assert stream.closed
    await stream.close()
    await child.communicate()


# --- raw gRPC, to be as rude as a stranger -----------------------------------------------------


@contextlib.asynccontextmanager
async def raw_call(address: str) -> AsyncIterator[grpc.aio.StreamStreamCall]:
    channel = grpc.aio.insecure_channel(address)
    call = channel.stream_stream("/dspark.data.v1.Frames/Stream")()
    try:
        yield call
    finally:
        call.cancel()
        await channel.close()


@contextlib.asynccontextmanager
async def raw_server(handler: object) -> AsyncIterator[str]:
    server = grpc.aio.server()
    method = grpc.stream_stream_rpc_method_handler(handler)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("dspark.data.v1.Frames", {"Stream": method}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
