"""The application: three pools of replicas, each a Serve deployment of its own."""

from __future__ import annotations

from typing import Any, Final

from ray import serve

from cluster.config import Config
from deploy.drafter import DrafterReplica
from deploy.ingress import Ingress
from deploy.resources import verifier_resources
from deploy.verifier import VerifierReplica

_MAX_ONGOING: Final = 100_000
"""Of an ingress replica: the router's own bounded queue refuses first, with a time to retry."""
_HEALTH_PERIOD_S: Final = 2.0
_HEALTH_TIMEOUT_S: Final = 10.0
_SHUTDOWN_TIMEOUT_S: Final = 10.0


def build_app(config: Config) -> serve.Application:
    """Lay out the pools that ``config`` asks for; ``serve.run`` or a Serve config deploys it."""
    drafted = config.drafter.checkpoint != "none" and config.drafter.num_replicas > 0
    verifier, drafter = config.verifier, config.drafter
    pools = [
        _pool(VerifierReplica, "Verifier", verifier.num_replicas, **verifier_resources(verifier))
    ]
    if drafted:
        resources = {
            "ray_actor_options": {"num_cpus": drafter.num_cpus, "num_gpus": drafter.num_gpus}
        }
        pools.append(_pool(DrafterReplica, "Drafter", drafter.num_replicas, **resources))
    ingress = serve.deployment(
        Ingress,
        name="Router",
        num_replicas=config.router.num_replicas,
        max_ongoing_requests=_MAX_ONGOING,
        ray_actor_options={"num_cpus": config.router.num_cpus},
        **_lifecycle(),
    )
    return ingress.bind(config, *(pool.bind(config) for pool in pools))


def _pool(cls: type[Any], name: str, num_replicas: int, **resources: Any) -> serve.Deployment:
    return serve.deployment(cls, name=name, num_replicas=num_replicas, **resources, **_lifecycle())


def _lifecycle() -> dict[str, float]:
    return {
        "health_check_period_s": _HEALTH_PERIOD_S,
        "health_check_timeout_s": _HEALTH_TIMEOUT_S,
        "graceful_shutdown_timeout_s": _SHUTDOWN_TIMEOUT_S,
        "graceful_shutdown_wait_loop_s": 0.2,
    }
