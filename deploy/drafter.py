"""The drafter pool as a Serve deployment. Serve places and watches; data flows on our streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.config import Config
from cluster.drafter_spec import NGRAM
from cluster.errors import ConfigError
from cluster.fingerprint import drafter_fingerprint, folder_fingerprint
from cluster.priority import give_way
from deploy import replica

if TYPE_CHECKING:  # heavy imports, and threads must be set before them
    from drafter_service.node import DrafterNode


class DrafterReplica:
    """One drafter: loads its model, registers, drafts for whoever connects."""

    async def __init__(self, config: Config) -> None:  # type: ignore[misc]  # Serve awaits it
        give_way()
        self._node = await replica.in_passing(self._load, config)
        await self._node.start()

    @staticmethod
    def _load(config: Config) -> DrafterNode:
        replica.set_threads(config.drafter.num_threads)
        from cluster.device_identity import device_identity
        from drafter_service.node import DrafterNode
        from drafter_service.opening import open_drafter
        from verifier_service.torch_engine.loading import resolve_device

        target, source = replica.folders(config)
        if source is None:
            raise ConfigError("drafter.checkpoint: none", hint="set drafter.num_replicas to 0")
        device = resolve_device(config.model.device)
        engine = open_drafter(source, target, config.drafter, device=device)
        return DrafterNode(
            member_id=replica.member_id("drafter"),
            engine=engine,
            config=config,
            directory=replica.directory(config),
            model=folder_fingerprint(target),
            drafter=drafter_fingerprint(source, config.drafter.lookup),
            device=device_identity("cpu" if source == NGRAM else device),
            host=replica.data_host(config),
        )

    def check_health(self) -> None:
        """Called by Serve; raising has the replica replaced."""
        self._node.check_health()

    async def __del__(self) -> None:
        """Called by Serve when the replica is asked to go."""
        await self._node.stop()
