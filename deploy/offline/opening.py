"""Loading of both halves of an offline pair from their names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cluster.config import DrafterConfig, ModelConfig, VerifierConfig
from cluster.drafter_spec import DrafterSource
from cluster.errors import ModelNotFound
from cluster.model_store import ensure_drafter
from deploy.offline.prompts import Prompt
from drafter_service.drafter import Drafter
from drafter_service.opening import open_drafter
from verifier_service.torch_engine import TorchEngine, load_engine
from verifier_service.torch_engine.loading import resolve_device

_MANY_REQUESTS: Final = 4096
_NEVER_S: Final = 86400.0
_MAX_STEP_TOKENS: Final = 1024
_MAX_KV_TOKENS: Final = 1 << 16
_BLOCK_TOKENS: Final = VerifierConfig.kv_block_tokens


def resolve_drafter(name: str | Path, target: str = "") -> DrafterSource:
    """The drafter that a user means (see `ensure_drafter`), where there must be one.

    Args:
        target: as the user named it, of whose drafter ``default`` speaks.

    Raises:
        ModelNotFound: no such drafter; ``none`` is none.
        ConfigError: ``default`` for a target that has no shipped drafter.
        ModelStoreError: a folder without a checkpoint, or the hub is out of reach.
    """
    source = ensure_drafter(str(name), target)
    if source is None:
        raise ModelNotFound(
            f"no drafter {str(name)!r}: there is nothing to play", hint="name one that drafts"
        )
    return source


def kv_tokens_for(
    prompts: Sequence[Prompt], *, max_new_tokens: int, max_positions: int, concurrency: int
) -> int:
    """Target KV, in positions, with room for any ``concurrency`` of these requests at once.

    Where that is more than `_MAX_KV_TOKENS`, it is for as many as those hold, and one at least; the
    others wait. No request is longer than ``max_positions``.
    """
    lengths = [min(len(prompt.ids) + max_new_tokens, max_positions) for prompt in prompts]
    blocks = [-(-length // _BLOCK_TOKENS) for length in sorted(lengths, reverse=True)]
    wanted = sum(blocks[:concurrency]) * _BLOCK_TOKENS
    return max(min(wanted, _MAX_KV_TOKENS), blocks[0] * _BLOCK_TOKENS)


def open_engine(
    target: Path, source: DrafterSource | None, *, device: str, kv_tokens: int
) -> TorchEngine:
    """The target, with the projection of ``source`` where it has one.

    Without a prefix cache: what was found was computed in another batch and differs in its last
    bits, and an offline run must repeat itself to the last one.
    """
    return load_engine(
        target,
        model=ModelConfig(target=str(target), device=device, max_model_len=1 << 20),
        verifier=VerifierConfig(
            kv_tokens=kv_tokens,
            max_requests=_MANY_REQUESTS,
            max_step_tokens=_MAX_STEP_TOKENS,
            prefix_cache=False,
        ),
        drafter=source if isinstance(source, Path) else None,
    )


def open_drafting(source: DrafterSource, target: Path, *, device: str, calibrated: bool) -> Drafter:
    """The drafter, with room for whatever an offline run has in flight."""
    config = DrafterConfig(max_sessions=_MANY_REQUESTS, idle_session_s=_NEVER_S)
    where = resolve_device(device)
    return open_drafter(source, target, config, device=where, calibrated=calibrated)
