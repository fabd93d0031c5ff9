"""Data parallel training: the processes that torchrun started, or this one alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor, distributed, nn

_PATIENCE = timedelta(hours=12)
"""Others wait this long while one rank generates or evaluates; torchrun ends all if one dies."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Which of how many processes this is. Alone, every exchange is the identity."""

    rank: int = 0
    num: int = 1

    @property
    def is_main(self) -> bool:
        """The one that writes checkpoints and exports, evaluates, and reports."""
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """The sum over ranks, on every rank."""
        if self.num > 1:
            distributed.all_reduce(value)
        return value

    def of_main(self, value: float, device: torch.device) -> float:
        """The main rank's value, on every rank."""
        if self.num == 1:
            return value
        own = value if self.is_main else 0.0
        return self.sum(torch.tensor(own, dtype=torch.float64, device=device)).item()

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add the gradients of all ranks, in one exchange."""
        if self.num == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        distributed.all_reduce(flat)
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def wait(self) -> None:
        """Until every rank is here."""
        if self.num > 1:
            distributed.barrier()

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """The main rank runs the block before the others do."""
        if not self.is_main:
            self.wait()
        yield
        if self.is_main:
            self.wait()


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """Join the processes of torchrun, where it started this one; leave them at the end.

    An outer call joins and leaves; calls inside it find the same ranks.

    Args:
        device: ``cuda`` joins by NCCL, each rank on the device of its number on this machine.
    """
    if not distributed.is_torchelastic_launched():
        yield Ranks()
        return
    if distributed.is_initialized():
        yield Ranks(rank=distributed.get_rank(), num=distributed.get_world_size())
        return
    on_cuda = torch.device(device).type == "cuda"
    if on_cuda:
        torch.cuda.set_device(distributed.get_node_local_rank())
    distributed.init_process_group("nccl" if on_cuda else "gloo", timeout=_PATIENCE)
    try:
        yield Ranks(rank=distributed.get_rank(), num=distributed.get_world_size())
    finally:
        distributed.destroy_process_group()
