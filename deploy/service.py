"""Start the application on Ray Serve, wait until it can serve, stop what was started."""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.config import Config
from cluster.directory import end_directory
from cluster.errors import ConfigError, Unavailable
from cluster.model_store import ensure_drafter, ensure_model
from cluster.wheel import Report
from deploy.local_ray import LOOPBACK, free_port, joined_ray, private_ray, rank_platform

SERVICERS: Final = (
    "cluster.api.dspark_v1_pb2_grpc.add_DSparkServicer_to_server",
    "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
)
_QUIET: Final = {"log_level": "ERROR", "enable_access_log": False}
_READY_TIMEOUT_S: Final = 120.0

Phase = Callable[[str], None]
"""Told the name of each phase as it begins."""


@contextmanager
def serving(config: Config, *, ray_address: str, phase: Phase, report: Report) -> Iterator[str]:
    """Run the application while the block runs; yields its gRPC address.

    Args:
        config: the whole configuration; its models are fetched here first.
        ray_address: a running Ray to join, or empty to start a private one.
        phase: told what is going on.
        report: progress of a model fetch.

    Raises:
        DSparkError: whatever keeps it from serving, in one line.
    """
    phase("model")
    ensure_model(config.model.target, report)
    ensure_drafter(config.drafter.checkpoint, config.model.target)
    with ExitStack() as stack:
        if ray_address:
            phase("joining Ray")
            stack.enter_context(joined_ray(ray_address))
        else:
            phase("starting Ray")
            require_free(config.cluster.grpc_port)
            config = replace(config, cluster=replace(config.cluster, data_host=LOOPBACK))
            haproxy = config.cluster.proxy == "haproxy"
            stack.enter_context(private_ray(num_cpus=_logical_cpus(config), haproxy=haproxy))
        started = _start_serve(config)
        if not ray_address:
            rank_platform()
        # A private Ray takes Serve with it when it ends.
        stack.callback(
            stop_application,
            config.cluster.application,
            whole_serve=started and bool(ray_address),
        )
        phase("loading target and drafter")
        start_application(config)
        phase("profiling the target, taking the lane")
        address = f"{LOOPBACK}:{config.cluster.grpc_port}"
        wait_ready(address, config, _READY_TIMEOUT_S)
        yield address


def wait_ready(address: str, config: Config, timeout_s: float) -> None:
    """Wait until the health service says SERVING.

    Raises:
        Unavailable: not within ``timeout_s``.
    """
    metadata = (("application", config.cluster.application),)
    deadline_s = time.monotonic() + timeout_s
    last = "no answer"
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline_s:
            try:
                request = health_pb2.HealthCheckRequest()
                answer = stub.Check(request, timeout=5, metadata=metadata)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                last = "the router has no lane yet"
            except grpc.RpcError as error:
                last = f"{error.code().name}: {error.details()}"
            time.sleep(0.2)
    raise Unavailable(f"not ready after {timeout_s:.0f} s: {last}")


def _start_serve(config: Config) -> bool:
    """Start Serve with our gRPC services, if it is not running. Returns whether it was started."""
    from ray import serve
    from ray.serve.config import gRPCOptions

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    if serve.status().proxies:
        return False
    serve.start(
        proxy_location="EveryNode",
        http_options={"host": LOOPBACK, "port": free_port()},
        grpc_options=gRPCOptions(
            port=config.cluster.grpc_port, grpc_servicer_functions=list(SERVICERS)
        ),
        logging_config=_QUIET,
    )
    return True


def start_application(config: Config) -> None:
    """Run the application on the Serve of this process's Ray, beside any other.

    Raises:
        Unavailable: not all replicas started, and why.
    """
    from ray import serve

    from deploy.app import build_app

    try:
        serve.run(
            build_app(config),
            name=config.cluster.application,
            # Without a prefix the gRPC proxy does not find the application either.
            route_prefix=f"/{config.cluster.application}",
            logging_config=_QUIET,
        )
    except RuntimeError as error:
        application = serve.status().applications.get(config.cluster.application)
        pools = application.deployments if application else {}
        told = {name: pool.message for name, pool in pools.items() if pool.message}
        raise failure(told or {"application": str(error)}) from error


def failure(told: Mapping[str, str]) -> Unavailable:
    """What kept replicas from starting, in a line: the error that their tracebacks end in.

    Args:
        told: Serve's message for each pool, most of them no more than a count of replicas.
    """
    causes = []
    for pool, text in told.items():
        found = re.findall(r"^(?:[\w.]+\.)?([A-Z]\w+): (.+)$", text, re.MULTILINE)
        if found:
            name, message = found[-1]
            causes.append(f"{pool}: {name}: {message}")
    texts = causes or [" ".join(text.split())[:300] for text in told.values()]
    return Unavailable(f"not all replicas started: {'; '.join(texts)}")


def stop_application(application: str, *, whole_serve: bool = False) -> None:
    """Stop the application and forget its directory; with ``whole_serve``, stop Serve as well."""
    from ray import serve

    if whole_serve:
        serve.shutdown()
    else:
        serve.delete(application)
    end_directory(application)


def _logical_cpus(config: Config) -> int:
    pools: tuple[Any, ...] = (config.router, config.verifier, config.drafter)
    reserved = math.ceil(sum(pool.num_replicas * pool.num_cpus for pool in pools))
    return max(int(reserved), os.cpu_count() or 1)


def require_free(port: int) -> None:
    """Refuse a port that someone listens on.

    Raises:
        ConfigError: it is taken.
    """
    # By IPv4, which every machine has: it also meets those who listen on both.
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(
                f"cluster.grpc_port: {port} is taken ({error.strerror})",
                hint="choose another with --port",
            ) from error
