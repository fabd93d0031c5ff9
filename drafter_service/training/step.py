"""One training step: from a pack to new weights, without waiting for a number.

Losses stay on the device until `read` takes many of them at once: on a GPU every look at a number
stops the queue of kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from drafter_service.training.loss import Loss, draft_law, objective, total_weights
from drafter_service.training.optimiser import require_finite
from drafter_service.training.packing import Pack
from drafter_service.training.progress import StepRecord
from drafter_service.training.run import Run

LossOf = Callable[[Pack, Tensor], Loss]
"""Of a pack, as this rank's share of the step's; see `drafter_service.training.loss.objective`."""


def loss_function(run: Run) -> LossOf:
    """The forward half of a step, compiled if the run asks for it."""
    model, config, forward = run.model, run.config, run.architecture.block_output
    device = model.d2t.device.type

    def loss_of(batch: Pack, totals: Tensor) -> Loss:
        with torch.no_grad():
            law_BGV = draft_law(model, batch)
        with torch.autocast(device, torch.bfloat16, enabled=config.precision == "bf16"):
            output = forward(model, batch)
        return objective(output, law_BGV, batch, run.t2d, config.loss, totals)

    if config.compile_backend is None:
        return loss_of
    compiled: LossOf = torch.compile(loss_of, backend=config.compile_backend)
    return compiled


def update(run: Run, loss_of: LossOf, batch: Pack, step: int, spent: float) -> Tensor:
    """One update of the weights.

    Args:
        batch: this rank's part of the step, on the model's device.
        spent: see `optimiser.learning_rate`.

    Returns:
        [5] on the device: this rank's shares of the losses of a `StepRecord`, then the gradient's
        norm over all ranks.
    """
    totals = run.ranks.sum(total_weights(batch, run.t2d, run.config.loss))
    loss = loss_of(batch, totals)
    norm = run.optimiser.update(loss.total, step, spent)
    shares = (loss.total, loss.cross_entropy, loss.total_variation, loss.confidence)
    return torch.stack([*(share.detach() for share in shares), norm])


def read(run: Run, first_step: int, unread: Sequence[Tensor]) -> list[StepRecord]:
    """Records of consecutive steps from what `update` returned, the same on every rank.

    Raises:
        TrainingDiverged: a loss or a norm is not finite; names the first such step.
    """
    values = torch.stack(list(unread))
    values[:, :4] = run.ranks.sum(values[:, :4].contiguous())
    records = []
    for step, row in enumerate(values.tolist(), start=first_step):
        loss, cross_entropy, total_variation, confidence, norm = row
        require_finite(step, loss, norm)
        records.append(
            StepRecord(
                step=step,
                loss=loss,
                cross_entropy=cross_entropy,
                total_variation=total_variation,
                confidence=confidence,
                gradient_norm=norm,
            )
        )
    return records
