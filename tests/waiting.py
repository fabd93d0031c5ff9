"""Waiting for what other tasks will bring about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def eventually(condition: Callable[[], object], within_s: float = 10.0) -> None:
    """Return once ``condition`` holds; TimeoutError if it does not in time."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - any condition at all, so polling is the way
            await asyncio.sleep(0.002)
