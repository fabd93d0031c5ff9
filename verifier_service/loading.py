"""The engine that a configuration asks for."""

from __future__ import annotations

from pathlib import Path

from cluster.config import ModelConfig, VerifierConfig
from verifier_service.engine import Engine


def load_engine(
    target: Path, *, model: ModelConfig, verifier: VerifierConfig, drafter: Path | None = None
) -> Engine:
    """Build the engine of a verifier replica. Only the one that is asked for is imported.

    Args:
        target: folder that ``model.target`` has been resolved to.
        drafter: checkpoint folder whose projection is applied; None ships no features.

    Raises:
        DSparkError: see `verifier_service.torch_engine.load_engine` and
            `verifier_service.vllm.load_engine`.
    """
    if verifier.engine == "vllm":
        from verifier_service.vllm import load_engine as load
    else:
        from verifier_service.torch_engine import load_engine as load  # type: ignore[assignment]
    return load(target, model=model, verifier=verifier, drafter=drafter)
