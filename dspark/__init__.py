"""The public face of DSpark Serve: the client (no torch, no Ray behind this import) and the CLI."""

from cluster.errors import DSparkError
from dspark.async_client import AsyncClient, AsyncGeneration
from dspark.client import Client, Generation
from dspark.messages import Chunk, Model, Options, Usage

__all__ = [
    "AsyncClient",
    "AsyncGeneration",
    "Chunk",
    "Client",
    "DSparkError",
    "Generation",
    "Model",
    "Options",
    "Usage",
]
