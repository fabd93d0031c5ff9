"""The verifier pool as a Serve deployment. Serve places and watches; data flows on our streams."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cluster.config import Config
from cluster.fingerprint import drafter_fingerprint
from deploy import replica

if TYPE_CHECKING:  # heavy imports, and threads must be set before them
    from verifier_service.node import VerifierNode


class VerifierReplica:
    """One verifier: loads its engine, measures it, registers, serves lanes."""

    async def __init__(self, config: Config) -> None:  # type: ignore[misc]  # Serve awaits it
        self._node = await replica.in_passing(self._load, config)
        await self._node.start()

    @staticmethod
    def _load(config: Config) -> VerifierNode:
        replica.set_threads(config.verifier.num_threads)
        from cluster.device_identity import device_identity
        from cluster.pinning import pin_team
        from verifier_service.loading import load_engine
        from verifier_service.node import VerifierNode
        from verifier_service.torch_engine.loading import resolve_device

        target, drafter = replica.folders(config)
        device = resolve_device(config.model.device)
        engine = load_engine(
            target,
            model=config.model,
            verifier=config.verifier,
            drafter=drafter if isinstance(drafter, Path) else None,
        )
        return VerifierNode(
            member_id=replica.member_id("verifier"),
            engine=engine,
            config=config,
            directory=replica.directory(config),
            drafter=drafter_fingerprint(drafter, config.drafter.lookup),
            device=device_identity(device),
            host=replica.data_host(config),
            prepare=pin_team if device.type == "cpu" else None,
        )

    def check_health(self) -> None:
        """Called by Serve; raising has the replica replaced."""
        self._node.check_health()

    async def __del__(self) -> None:
        """Called by Serve when the replica is asked to go."""
        await self._node.stop()
