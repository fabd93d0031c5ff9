"""Flags go over the file; what they do not name stays as the file has it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from cluster.config import Config
from cluster.errors import ConfigError
from dspark.configuration import add_config_arguments, config_from


def parse(*words: str) -> Config:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    return config_from(parser.parse_args(words))


@pytest.mark.parametrize("name", ["ngram", "none", "/a/folder"])
def test_a_drafter_by_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("drafter: {checkpoint: other, num_replicas: 3}\n")
    config = parse("--config", str(tmp_path / "c.yaml"), "--drafter", name)
    assert (config.drafter.checkpoint, config.drafter.num_replicas) == (name, 3)


def test_without_flags_the_file_decides(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("drafter: {checkpoint: ngram}\ncluster: {grpc_port: 9100}\n")
    config = parse("--config", str(tmp_path / "c.yaml"))
    assert (config.drafter.checkpoint, config.cluster.grpc_port) == ("ngram", 9100)


def test_an_engine_by_name(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("verifier: {kv_tokens: 4096}\n")
    config = parse("--config", str(tmp_path / "c.yaml"), "--engine", "vllm")
    assert (config.verifier.engine, config.verifier.kv_tokens) == ("vllm", 4096)
    assert parse("--config", str(tmp_path / "c.yaml")).verifier.engine == "torch"
    with pytest.raises(ConfigError, match=r"^verifier\.engine"):
        parse("--engine", "tensorrt")
    (tmp_path / "c.yaml").write_text("verifier: {engine: vllm, kv_tokens: 0}\n")
    with pytest.raises(ConfigError, match=r"^verifier\.kv_tokens: 0"):
        parse("--config", str(tmp_path / "c.yaml"), "--engine", "torch")
