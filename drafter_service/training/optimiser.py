"""AdamW over the drafter's own parameters: warm-up, cosine, clipping (paper section 5.1)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from cluster.errors import TrainingDiverged
from drafter_service.training.config import Schedule
from drafter_service.training.draft_model import DraftModel
from drafter_service.training.ranks import Ranks

_FLOOR = 0.05
"""Learning rate at the end of the cosine, relative to its peak."""


def learning_rate(schedule: Schedule, step: int, spent: float = 0.0) -> float:
    """Rate of step ``step`` (from 0): linear warm-up, then a cosine down to a twentieth.

    Args:
        spent: share of a time budget that is used up; the cosine follows whichever is further.
    """
    warmup = round(schedule.warmup_fraction * schedule.num_steps)
    if step < warmup:
        return schedule.learning_rate * (step + 1) / warmup
    progress = max(spent, (step - warmup) / max(1, schedule.num_steps - warmup))
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return schedule.learning_rate * (_FLOOR + (1 - _FLOOR) * cosine)


class Optimiser:
    """One update at a time; its state is what `torch.optim.AdamW` keeps.

    Args:
        ranks: whose gradients are added up.
    """

    def __init__(self, model: DraftModel, schedule: Schedule, ranks: Ranks | None = None) -> None:
        self._ranks = ranks or Ranks()
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

    def update(self, loss: Tensor, step: int, spent: float = 0.0) -> Tensor:
        """Backward and one update; parameters stay as they are if the gradient is not finite.

        Nothing is read back from the device; see `require_finite`.

        Args:
            loss: this rank's share.
            spent: see `learning_rate`.

        Returns:
            The norm, a scalar, of the gradient over all ranks before clipping.
        """
        self.inner.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self._ranks.sum_gradients(self._parameters)
        norm: Tensor = nn.utils.clip_grad_norm_(self._parameters, self._schedule.clip_norm)
        for group in self.inner.param_groups:
            group["lr"] = learning_rate(self._schedule, step, spent)
        # What torch's GradScaler sets: the fused kernel then skips the update on the device.
        self.inner.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        self.inner.step()
        return norm


def require_finite(step: int, loss: float, norm: float) -> None:
    """Check the numbers of a step once they are at hand.

    Raises:
        TrainingDiverged: loss or gradient norm is not finite.
    """
    for name, value in (("loss", loss), ("gradient norm", norm)):
        if not math.isfinite(value):
            raise TrainingDiverged(f"{name} is {value} at step {step}", hint=_HINT)


_HINT = "the last checkpoint is kept; start again with a lower learning rate"
