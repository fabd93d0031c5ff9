"""What Ray reserves for a replica."""

from __future__ import annotations

from typing import Any

from cluster.config import VerifierConfig


def verifier_resources(config: VerifierConfig) -> dict[str, Any]:
    """What Ray reserves for a verifier replica, as options of its Serve deployment.

    Worker processes of vLLM share the replica's own reservation. Its Ray workers want a bundle with
    a GPU each, on as few nodes as possible; the replica itself then sits in the first bundle and
    takes no GPU.
    """
    parallel = config.vllm.tensor_parallel
    by_ray = config.engine == "vllm" and parallel > 1 and config.vllm.executor == "ray"
    if not by_ray:
        return {"ray_actor_options": {"num_cpus": config.num_cpus, "num_gpus": config.num_gpus}}
    bundles = [{"GPU": 1.0} for _ in range(parallel)]
    bundles[0]["CPU"] = config.num_cpus
    return {
        "ray_actor_options": {"num_cpus": config.num_cpus, "num_gpus": 0},
        "placement_group_bundles": bundles,
        "placement_group_strategy": "PACK",
    }
