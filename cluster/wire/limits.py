"""Hard limits of the protocol: both ends refuse what goes past them."""

from __future__ import annotations

from typing import Final

PROTOCOL_VERSION: Final = 1

MAX_FRAME_BYTES: Final = 64 << 20
"""Hard limit of one encoded frame; both ends set their gRPC limits to it."""
MAX_COMMIT_BYTES: Final = 1 << 20
"""Senders cut `Commit` frames at about this size, so that they interleave with others."""
MAX_ROWS: Final = 1 << 14
MAX_TOKENS: Final = 1 << 20
MAX_TOP_K: Final = 1 << 24
MAX_BIASES: Final = 1024
MAX_PROMPT_TOKENS: Final = 1 << 20
MAX_CONSTRAINT_CHARS: Final = 64 << 10
"""`cluster.constraints` counts bytes, so that what passes there fits."""
MAX_TIERS: Final = 256
"""Of a throughput profile; what the router does with it goes with their square."""
