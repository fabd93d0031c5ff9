"""What replicas ask Ray for, and the configurations that ship as examples."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config import load_config
from deploy.resources import verifier_resources

EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"


def resources(**verifier: object) -> dict[str, object]:
    return verifier_resources(load_config({"verifier": verifier}).verifier)


def test_a_replica_on_one_gpu_is_one_actor() -> None:
    found = resources(engine="vllm", num_cpus=2.0, num_gpus=1)
    assert found == {"ray_actor_options": {"num_cpus": 2.0, "num_gpus": 1}}


def test_processes_of_a_replica_share_its_reservation() -> None:
    found = resources(engine="vllm", num_gpus=4, vllm={"tensor_parallel": 4})
    assert found == {"ray_actor_options": {"num_cpus": 1.0, "num_gpus": 4}}


def test_ray_workers_get_a_bundle_each_and_the_replica_no_gpu() -> None:
    """The actor must fit the first bundle beside the worker that takes its GPU."""
    found = resources(
        engine="vllm", num_cpus=2.0, num_gpus=2, vllm={"tensor_parallel": 2, "executor": "ray"}
    )
    assert found == {
        "ray_actor_options": {"num_cpus": 2.0, "num_gpus": 0},
        "placement_group_bundles": [{"GPU": 1.0, "CPU": 2.0}, {"GPU": 1.0}],
        "placement_group_strategy": "PACK",
    }


def test_the_torch_engine_knows_nothing_of_it() -> None:
    found = resources(engine="torch", vllm={"tensor_parallel": 2, "executor": "ray"})
    assert found == {"ray_actor_options": {"num_cpus": 1.0, "num_gpus": 0}}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_are_whole(path: Path) -> None:
    """Each parses, serves Qwen3 by vLLM with its drafter, and names itself as it is started."""
    config = load_config(path)
    assert config.verifier.engine == "vllm"
    assert config.verifier.kv_tokens == 0
    size = "8b" if "8b" in path.stem else "4b"
    assert config.model.target.lower() == f"qwen/qwen3-{size}"
    assert config.drafter.checkpoint == f"deepseek-ai/dspark_qwen3_{size}_block7"
    assert f"--config deploy/examples/{path.name}" in path.read_text()
    assert (
        config.verifier.num_gpus + config.drafter.num_gpus
        <= {"h": 1, "2": 2, "3": 3}[path.stem.split("_")[2][0]]
    )


def test_there_are_examples() -> None:
    assert len(list(EXAMPLES.glob("*.yaml"))) == 5
