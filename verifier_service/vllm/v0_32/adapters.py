"""LoRA adapters of the target in vLLM."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore

from cluster.errors import ConfigError


def load_adapters(core: EngineCore, adapters: Mapping[str, str]) -> dict[str, LoRARequest]:
    """Load all of them, now: one that does not fit must not wait for its first request.

    Args:
        adapters: folders by name.

    Raises:
        ConfigError: names the adapter, with vLLM's reason.
    """
    requests = {}
    for place, (name, path) in enumerate(adapters.items(), start=1):
        requests[name] = LoRARequest(lora_name=name, lora_int_id=place, lora_path=path)
        try:
            core.add_lora(requests[name])
        except Exception as error:  # vLLM and the readers of files raise what they like
            reason = " ".join(str(error).split())[:600] or type(error).__name__
            raise ConfigError(f"verifier.adapters.{name}: vLLM refuses it: {reason}") from error
    return requests
