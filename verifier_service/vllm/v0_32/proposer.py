"""The proposer that vLLM is given: it proposes nothing. Drafts come from outside."""

from __future__ import annotations

from typing import Any, Final

PATH: Final = f"{__name__}.NoDrafts"


class NoDrafts:
    """Turns vLLM's speculative path on, and is called behind every step."""

    def __init__(self, vllm_config: Any) -> None:
        del vllm_config

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """The CPU runner calls it unconditionally. Nothing to load."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        """An empty draft for each request."""
        return [[] for _ in sampled_token_ids]
