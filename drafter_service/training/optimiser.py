"""AdamW over the drafter's own parameters: warm-up, cosine, clipping (paper section 5.1)."""

from __future__ import annotations

import math

import torch
from torch import nn

from cluster.errors import TrainingDiverged
from drafter_service.training.config import Schedule

_FLOOR = 0.05
"""Learning rate at the end of the cosine, relative to its peak."""


def learning_rate(schedule: Schedule, step: int) -> float:
    """Rate of step ``step`` (from 0): linear warm-up, then a cosine down to a twentieth."""
    warmup = round(schedule.warmup_fraction * schedule.num_steps)
    if step < warmup:
        return schedule.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, schedule.num_steps - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return schedule.learning_rate * (_FLOOR + (1 - _FLOOR) * cosine)


class Optimiser:
    """One update at a time; its state is what `torch.optim.AdamW` keeps."""

    def __init__(self, model: nn.Module, schedule: Schedule) -> None:
        self._schedule = schedule
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in self._parameters if p.ndim > 1]
        vectors = [p for p in self._parameters if p.ndim <= 1]
        self.inner = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": schedule.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=schedule.learning_rate,
            betas=(0.9, 0.98),
            fused=True,
        )

    def update(self, loss: torch.Tensor, step: int) -> float:
        """Backward and one update. Returns the gradient's norm before clipping.

        Raises:
            TrainingDiverged: loss or gradient is not finite; no parameter has been changed.
        """
        if not bool(torch.isfinite(loss)):
            raise TrainingDiverged(f"loss is {loss.item()} at step {step}", hint=_HINT)
        self.inner.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = float(nn.utils.clip_grad_norm_(self._parameters, self._schedule.clip_norm))
        if not math.isfinite(norm):
            raise TrainingDiverged(f"gradient norm is {norm} at step {step}", hint=_HINT)
        for group in self.inner.param_groups:
            group["lr"] = learning_rate(self._schedule, step)
        self.inner.step()
        return norm


_HINT = "the last checkpoint is kept; start again with a lower learning rate"
