from __future__ import annotations

import pytest
import torch
from torch import nn

from cluster.errors import ConfigError, TrainingDiverged
from drafter_service.training.config import DrafterShape, Schedule
from drafter_service.training.optimiser import Optimiser, learning_rate, require_finite

SCHEDULE = Schedule(num_steps=100, learning_rate=1.0, warmup_fraction=0.1)


def test_the_rate_warms_up_and_falls_along_a_cosine() -> None:
    rates = [learning_rate(SCHEDULE, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0)
    assert max(rates) == rates[9] or max(rates) == rates[10]
    assert rates[55] == pytest.approx(0.525, abs=0.01)  # halfway between peak and floor
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate(SCHEDULE, 100) == pytest.approx(0.05)


def test_an_update_is_clipped_adamw() -> None:
    model = nn.Linear(2, 1, bias=False)
    twin = nn.Linear(2, 1, bias=False)
    twin.load_state_dict(model.state_dict())
    optimiser = Optimiser(model, SCHEDULE)
    reference = torch.optim.AdamW(
        twin.parameters(), lr=0.1, betas=(0.9, 0.98), weight_decay=SCHEDULE.weight_decay
    )
    inputs = torch.tensor([[30.0, 40.0]])
    norm = optimiser.update(model(inputs).sum(), step=0)
    assert norm == pytest.approx(50.0)  # before clipping
    twin.weight.grad = inputs / 50.0
    reference.step()
    torch.testing.assert_close(model.weight, twin.weight)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_changes_nothing(value: float) -> None:
    model = nn.Linear(2, 1)
    before = [p.detach().clone() for p in model.parameters()]
    loss = model(torch.ones(1, 2)).sum() * value
    norm = Optimiser(model, SCHEDULE).update(loss, step=7)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(TrainingDiverged, match=r"loss is .* step 7"):
        require_finite(7, loss.item(), norm.item())


def test_a_finite_loss_with_an_infinite_gradient_changes_nothing() -> None:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    loss = model(torch.ones(1, 2)).sum().abs().sqrt()
    norm = Optimiser(model, SCHEDULE).update(loss, step=0)
    assert not model.weight.any()
    with pytest.raises(TrainingDiverged, match=r"gradient norm is .* step 0"):
        require_finite(0, loss.item(), norm.item())


def test_an_update_that_was_skipped_leaves_the_next_one_as_it_would_have_been() -> None:
    model, twin = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    twin.load_state_dict(model.state_dict())
    skipping, plain = Optimiser(model, SCHEDULE), Optimiser(twin, SCHEDULE)
    inputs = torch.tensor([[3.0, 4.0]])
    skipping.update(model(inputs).sum() * torch.nan, step=0)
    skipping.update(model(inputs).sum(), step=1)
    plain.update(twin(inputs).sum(), step=1)
    assert torch.equal(model.weight, twin.weight)


def test_a_time_budget_can_only_hasten_the_cosine() -> None:
    assert learning_rate(SCHEDULE, 55, spent=0.2) == learning_rate(SCHEDULE, 55)
    assert learning_rate(SCHEDULE, 12, spent=0.5) == pytest.approx(0.525)
    assert learning_rate(SCHEDULE, 12, spent=1.5) == pytest.approx(0.05)
    assert learning_rate(SCHEDULE, 3, spent=0.5) == learning_rate(SCHEDULE, 3)  # warm-up first


@pytest.mark.parametrize(
    "make",
    [
        lambda: Schedule(num_steps=0),
        lambda: Schedule(learning_rate=0.0),
        lambda: Schedule(warmup_fraction=1.0),
        lambda: DrafterShape(gamma=0),
        lambda: DrafterShape(head="none"),
        lambda: DrafterShape(markov_rank=0),
    ],
)
def test_impossible_settings_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(ConfigError):
        make()
