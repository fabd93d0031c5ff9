"""The configuration of a command: file, then environment, then flags."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from cluster.config import Config, fitting, load_config
from cluster.environment import with_environment
from cluster.errors import ConfigError


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags shared by the commands that start a service."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML configuration")
    parser.add_argument(
        "--drafter",
        metavar="NAME",
        help="default, a bundled name, a checkpoint folder, a hub id, ngram, or none "
        "(drafter.checkpoint)",
    )
    parser.add_argument("--engine", help="torch or vllm (verifier.engine)")
    parser.add_argument("--port", type=int, help="gRPC port (cluster.grpc_port)")


def config_from(args: argparse.Namespace) -> Config:
    """Load the configuration that ``args`` ask for.

    Raises:
        ConfigError: a bad file, key, value, engine or port.
    """
    config = with_environment(load_config(args.config))
    if args.engine is not None:
        checked = load_config({"verifier": {"engine": args.engine}})  # refused by the key's name
        engine = checked.verifier.engine
        config = fitting(replace(config, verifier=replace(config.verifier, engine=engine)))
    if args.drafter is not None:
        config = replace(config, drafter=replace(config.drafter, checkpoint=args.drafter))
    if args.port is None:
        return config
    if not 0 < args.port < 1 << 16:
        raise ConfigError(f"--port: {args.port} is out of range", hint="1 to 65535")
    return replace(config, cluster=replace(config.cluster, grpc_port=args.port))
