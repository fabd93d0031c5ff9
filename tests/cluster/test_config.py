"""The configuration tree: parsed once, and every mistake named by its path."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from cluster.config import Config, load_config
from cluster.environment import auth_token, cache_dir, with_environment
from cluster.errors import ConfigError
from cluster.timeouts import require_timeout


def test_nothing_gives_the_defaults() -> None:
    assert load_config(None) == load_config({}) == Config()


def test_values_and_files(tmp_path: Path) -> None:
    path = tmp_path / "dspark.yaml"
    path.write_text("verifier: {max_requests: 3, lease_ttl_s: 2}\nmodel: {target: /m}\n")
    config = load_config(path)
    assert config.verifier.max_requests == 3
    assert config.verifier.lease_ttl_s == 2.0
    assert isinstance(config.verifier.lease_ttl_s, float)
    assert config.model.target == "/m"
    adapters = load_config({"verifier": {"adapters": {"sql": "/a"}}}).verifier.adapters
    assert adapters == {"sql": "/a"}
    assert config.router == Config().router
    (tmp_path / "empty.yaml").write_text("")
    assert load_config(tmp_path / "empty.yaml") == Config()


def test_every_key_is_read_somewhere() -> None:
    """A key that no code reads is a promise that nobody keeps."""
    root = Path(__file__).parents[2]
    packages = ("cluster", "router", "verifier_service", "drafter_service", "deploy", "dspark")
    sources = [path for name in packages for path in (root / name).rglob("*.py")]
    read = {
        node.attr
        for path in sources
        if path != root / "cluster" / "config.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    sections = [getattr(Config(), section.name) for section in dataclasses.fields(Config)]
    keys = {key.name for section in sections for key in dataclasses.fields(section)}
    assert len(keys) > 30
    assert keys <= read


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().verifier.max_requests = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ({"nonsense": 1}, "nonsense: unknown key"),
        ({"router": {"max_queued": 1}}, "router.max_queued: unknown key"),
        ({3: 1}, "3: unknown key"),
        ([1], "config: expected a mapping"),
        ({"router": 5}, "router: expected a mapping"),
        ({"router": None}, "router: expected a mapping"),
        ({"model": {"target": 5}}, "model.target: expected text"),
        ({"model": {"target": None}}, "model.target: expected text"),
        ({"verifier": {"max_requests": "8"}}, "verifier.max_requests: expected a whole number"),
        ({"verifier": {"max_requests": 1.5}}, "verifier.max_requests: expected a whole number"),
        ({"verifier": {"max_requests": True}}, "verifier.max_requests: expected a whole number"),
        ({"verifier": {"num_threads": 100_000}}, "verifier.num_threads: 100000 must be at most"),
        ({"drafter": {"num_threads": 100_000}}, "drafter.num_threads: 100000 must be at most"),
        ({"verifier": {"max_requests": 0}}, "verifier.max_requests: 0 must be over 0"),
        ({"verifier": {"lease_ttl_s": -1}}, "verifier.lease_ttl_s: -1.0 must be over 0"),
        ({"verifier": {"lease_ttl_s": float("nan")}}, "verifier.lease_ttl_s: nan is not a finite"),
        ({"router": {"step_timeout_s": float("inf")}}, "router.step_timeout_s: inf is not a fin"),
        ({"router": {"default_mode": "fast"}}, "router.default_mode: 'fast' is not one of coupl"),
        ({"router": {"explore_fraction": 1.5}}, "router.explore_fraction: 1.5 must be at most 1"),
        (
            {"router": {"explore_fraction": -0.1}},
            "router.explore_fraction: -0.1 must be at least 0",
        ),
        ({"router": {"scheduling": {"recalibrate": 1}}}, "router.scheduling.recalibrate: expected"),
        ({"verifier": {"engine": "jax"}}, "verifier.engine: 'jax' is not one of torch"),
        ({"model": {"dtype": "int8"}}, "model.dtype: 'int8' is not one of auto, float32"),
        ({"drafter": {"dtype": "half"}}, "drafter.dtype: 'half' is not one of auto, float32"),
        ({"cluster": {"heartbeat_s": 5}}, "cluster.member_ttl_s: 5.0 must be over cluster.heart"),
        ({"verifier": {"kv_tokens": 15}}, "verifier.kv_tokens: 15 is less than one block"),
        ({"cluster": {"grpc_port": 70000}}, "cluster.grpc_port: 70000 must be at most 65535"),
        ({"drafter": {"num_replicas": -1}}, "drafter.num_replicas: -1 must be at least 0"),
        ({"cluster": {"application": "a/b"}}, "cluster.application: 'a/b' is no name of an"),
        ({"cluster": {"application": ""}}, "cluster.application: '' is no name of an"),
        ({"verifier": {"adapters": ["sql"]}}, "verifier.adapters: expected a mapping"),
        ({"verifier": {"adapters": {"a b": "/x"}}}, "verifier.adapters, a key: 'a b' is no name"),
        ({"verifier": {"adapters": {"sql": " "}}}, "verifier.adapters.sql: no folder"),
        ({"drafter": {"q_top_k": 2000}}, "drafter.q_top_k: 2000 must be at most 1024"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_name_their_path(source: Any, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    assert caught.value.message.startswith(path)


def test_an_unknown_key_hints_at_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="max_queued_tokens"):
        load_config({"router": {"max_queued": 1}})


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.yaml"):
        load_config(tmp_path / "none.yaml")
    for data in (b"a: [", b"a: \xff", b"[" * 10_000):
        (tmp_path / "bad.yaml").write_bytes(data)
        with pytest.raises(ConfigError, match="not YAML"):
            load_config(tmp_path / "bad.yaml")


def test_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = load_config({"cluster": {"auth_token": "from file"}})
    monkeypatch.delenv("DSPARK_TOKEN", raising=False)
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    assert (auth_token(), cache_dir()) == ("", tmp_path)
    assert with_environment(config) is config
    monkeypatch.setenv("DSPARK_TOKEN", "from env")
    assert with_environment(config).cluster.auth_token == "from env"
    monkeypatch.delenv("DSPARK_CACHE")
    assert cache_dir().name == "dspark"


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_no_timeout_means_for_ever(seconds: float) -> None:
    with pytest.raises(ConfigError, match="connect_timeout_s"):
        require_timeout("connect_timeout_s", seconds)
    assert require_timeout("connect_timeout_s", 2) == 2.0


def test_only_vllm_takes_what_memory_holds() -> None:
    config = load_config({"verifier": {"engine": "vllm", "kv_tokens": 0}})
    assert config.verifier.kv_tokens == 0
    with pytest.raises(ConfigError, match=r"^verifier\.kv_tokens: 0") as caught:
        load_config({"verifier": {"kv_tokens": 0}})
    assert "torch engine" in caught.value.hint


def test_gpus_are_those_of_a_whole_replica() -> None:
    """None on a CPU, or one for each part of the model: any other number is a mistake."""
    for num_gpus in (0, 2):
        load_config({"verifier": {"num_gpus": num_gpus, "vllm": {"tensor_parallel": 2}}})
    with pytest.raises(ConfigError, match=r"^verifier\.num_gpus: 1 .*tensor_parallel = 2"):
        load_config({"verifier": {"num_gpus": 1, "vllm": {"tensor_parallel": 2}}})


def test_engine_arguments_go_through_as_they_are() -> None:
    given = {"quantization": "fp8", "max_loras": 3, "compilation_config": {"mode": 3}}
    config = load_config({"verifier": {"vllm": {"engine_args": given}}})
    assert config.verifier.vllm.engine_args == given
