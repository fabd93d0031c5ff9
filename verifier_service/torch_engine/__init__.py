"""The torch engine: embedded default, reference and oracle of the verifier pool."""

from verifier_service.torch_engine.engine import TorchEngine
from verifier_service.torch_engine.loading import load_engine

__all__ = ["TorchEngine", "load_engine"]
