"""The drafter pool as a Serve deployment. Serve places and watches; data flows on our streams."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cluster.config import Config
from cluster.errors import ConfigError
from cluster.fingerprint import folder_fingerprint
from deploy import replica

if TYPE_CHECKING:  # heavy imports, and threads must be set before them
    import torch

    from drafter_service.node import DrafterNode


class DrafterReplica:
    """One drafter: loads its model, registers, drafts for whoever connects."""

    async def __init__(self, config: Config) -> None:  # type: ignore[misc]  # Serve awaits it
        self._node = await asyncio.to_thread(self._load, config)
        await self._node.start()

    @staticmethod
    def _load(config: Config) -> DrafterNode:
        replica.set_threads(config.drafter.num_threads)
        from drafter_service.engine import DraftEngine
        from drafter_service.loading import load_drafter
        from drafter_service.node import DrafterNode
        from verifier_service.torch_engine.loading import resolve_device

        target, checkpoint = replica.folders(config)
        if checkpoint is None:
            raise ConfigError("drafter.checkpoint: none", hint="set drafter.num_replicas to 0")
        device = resolve_device(config.model.device)
        model = load_drafter(
            checkpoint, target, device=device, dtype=_dtype(config.drafter.dtype, device)
        )
        engine = DraftEngine(
            model,
            max_sessions=config.drafter.max_sessions,
            max_session_tokens=config.drafter.max_session_tokens,
            idle_session_s=config.drafter.idle_session_s,
            q_top_k=config.drafter.q_top_k,
        )
        return DrafterNode(
            member_id=replica.member_id("drafter"),
            engine=engine,
            config=config,
            directory=replica.directory(config),
            model=folder_fingerprint(target),
            drafter=folder_fingerprint(checkpoint),
            host=replica.data_host(config),
        )

    def check_health(self) -> None:
        """Called by Serve; raising has the replica replaced."""
        self._node.check_health()

    async def __del__(self) -> None:
        """Called by Serve when the replica is asked to go."""
        await self._node.stop()


def _dtype(name: str, device: torch.device) -> torch.dtype:
    """Weights of the drafter: ``auto`` is fp32 on a CPU and bf16 elsewhere."""
    import torch

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in dtypes:
        raise ConfigError(f"drafter.dtype: {name!r} is not one of auto, {', '.join(dtypes)}")
    return dtypes[name]
