"""Packs made ahead of time, so that a GPU never waits for the next one."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch

from drafter_service.training.batches import Batches
from drafter_service.training.packing import Pack


class Prefetch:
    """Packs of consecutive steps, on a device.

    Args:
        batches: where they come from; with ``ahead`` several threads ask it, so its feature
            store must be filled: two of them may want one shard.
        ahead: packs in the making beyond the current one, each in a thread of its own, laid out
            in pinned memory for a CUDA device. With 0 a pack is made when it is asked for.
        device: of the packs handed out.
    """

    def __init__(self, batches: Batches, *, ahead: int, device: torch.device) -> None:
        self._batches = batches
        self._ahead = ahead
        self._device = device
        self._threads = ThreadPoolExecutor(ahead, "packs") if ahead else None
        self._next = 0
        self._futures: deque[Future[Pack]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def get(self, step: int) -> Pack:
        """The pack of ``step``. Steps are asked for in rising order, without gaps.

        Raises:
            DSparkError: what `Batches.pack` raised.
        """
        if self._threads is None:
            return self._batches.pack(step).to(self._device)
        if not self._futures:
            self._next = step
        while len(self._futures) <= self._ahead:
            self._futures.append(self._threads.submit(self._make, self._next))
            self._next += 1
        return self._futures.popleft().result().to(self._device)

    def _make(self, step: int) -> Pack:
        made = self._batches.pack(step)
        return made.pinned() if self._device.type == "cuda" else made
