"""The vLLM engine of the verifier pool, for production. Import it only where vLLM is installed."""

from verifier_service.vllm.loading import load_engine

__all__ = ["load_engine"]
