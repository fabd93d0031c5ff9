from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from cluster.drafter_spec import HeadKind
from drafter_service.backbone import DSparkModel
from drafter_service.training.config import LossWeights
from drafter_service.training.loss import (
    BlockOutput,
    Loss,
    block_output,
    draft_law,
    l1_distance,
    objective,
    total_weights,
)
from drafter_service.training.packing import pack
from drafter_service.training.vocabulary import vocabulary_of
from tests.drafter_service.training import reference
from tests.drafter_service.training.test_packing import GAMMA, sequence, spec

WEIGHTS = LossWeights(distillation=0.25)
D2T = [0, 1, 3, 4, 6, 8, 9, 11, 13, 14, 17, 19]


def _model(head: HeadKind, rank: int) -> DSparkModel:
    model = reference.random_model(DSparkModel(spec(head=head, rank=rank)), seed=0)
    model.d2t = torch.tensor(D2T)
    return model


@pytest.mark.parametrize(("head", "rank"), [("vanilla", 4), ("gated", 4), ("rnn", 4), ("none", 0)])
def test_the_objective_equals_sums_over_the_full_vocabulary(head: HeadKind, rank: int) -> None:
    model = _model(head, rank)
    full_head_VD = torch.randn(20, 16, generator=torch.Generator().manual_seed(5)) * 0.5
    with torch.no_grad():
        model.lm_head.weight.copy_(full_head_VD[D2T])
    one = sequence(10, 3, seed=1)
    full_law = (one.hidden.float() @ full_head_VD.T).log_softmax(-1).exp()
    one.log_normaliser.copy_((one.hidden.float() @ full_head_VD.T).logsumexp(-1))
    anchors = [4, 7, 8]  # the last two run past the end

    ce = tv = bce = soft_ce = ce_weight = weight_sum = 0.0
    for anchor in anchors:
        hidden = reference.block_hidden(model, one, anchor)
        steps = range(min(GAMMA, len(one) - 1 - anchor))
        previous = one.ids[anchor : anchor + len(steps)].tolist()
        law = reference.block_law(model, hidden[: len(steps)], previous)
        confidence = _confidence(model, hidden, previous)
        for k in steps:
            weight = math.exp(-k / 4.0)
            truth = full_law[anchor + k]
            distance = float((law[k] - truth).abs().sum())
            label = int(one.ids[anchor + k + 1])
            if label in D2T:
                ce -= weight * math.log(float(law[k, label]))
                ce_weight += weight
            tv += weight * distance
            soft_ce -= weight * float((truth[D2T] * law[k, D2T].log()).sum())
            c = confidence[k]
            soft = 1 - distance / 2
            bce -= weight * (soft * math.log(c) + (1 - soft) * math.log(1 - c))
            weight_sum += weight
    batch = pack([one], torch.tensor([anchors]), GAMMA)
    with torch.no_grad():
        loss = objective(
            block_output(model, batch),
            draft_law(model, batch),
            batch,
            vocabulary_of(D2T, 20).t2d,
            WEIGHTS,
        )
    assert ce_weight < weight_sum  # some label lies outside the draft vocabulary
    assert float(loss.cross_entropy) == pytest.approx(ce / ce_weight, rel=1e-4)
    assert float(loss.total_variation) == pytest.approx(tv / weight_sum, rel=1e-4)
    assert float(loss.confidence) == pytest.approx(bce / weight_sum, rel=1e-4)
    assert float(loss.distillation) == pytest.approx(soft_ce / weight_sum, rel=1e-4)
    expected = 0.1 * ce / ce_weight + 0.9 * tv / weight_sum + 1.0 * bce / weight_sum
    expected += WEIGHTS.distillation * soft_ce / weight_sum
    assert float(loss.total) == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
def _confidence(model: DSparkModel, hidden: torch.Tensor, previous: list[int]) -> list[float]:
    head = model.confidence_head
    assert head is not None
    out = []
    for k, token in enumerate(previous):
        inputs = hidden[k]
        if model.markov_head is not None:
            inputs = torch.cat([inputs, model.markov_head.markov_w1.weight[token]])
        out.append(float(functional.linear(inputs, head.proj.weight, head.proj.bias).sigmoid()))
    return out


def test_mass_outside_the_draft_vocabulary_counts_in_the_distance() -> None:
    law = torch.tensor([[[0.2, 0.1]]])  # 0.7 of the target's mass cannot be drafted
    draft = torch.tensor([[[0.6, 0.4]]])
    assert l1_distance(draft, law).item() == pytest.approx(0.4 + 0.3 + 0.7)


def test_a_perfect_draft_has_no_distance_and_wants_full_confidence() -> None:
    model = _model("none", 0)
    one = sequence(8, 3, seed=1)
    batch = pack([one], torch.tensor([[3]]), GAMMA)
    logits = functional.linear(batch.hidden, model.lm_head.weight).flatten(0, 1)
    exact = batch.log_normaliser.copy_(logits.logsumexp(-1)[None])
    assert exact.isfinite().all()
    output = BlockOutput(logits=logits, confidence=torch.full((1, GAMMA), 20.0))
    t2d = vocabulary_of(D2T, 20).t2d
    with torch.no_grad():
        loss = objective(output, draft_law(model, batch), batch, t2d, WEIGHTS)
    assert float(loss.total_variation) == pytest.approx(0, abs=1e-5)
    assert float(loss.confidence) == pytest.approx(0, abs=1e-5)


def test_confidence_does_not_pull_on_the_distance_through_its_label() -> None:
    model = _model("vanilla", 4)
    batch = pack([sequence(8, 3, seed=1)], torch.tensor([[3]]), GAMMA)
    output = block_output(model, batch)
    frozen = BlockOutput(logits=output.logits, confidence=torch.zeros(1, GAMMA))
    only = LossWeights(cross_entropy=0.0, distillation=0.0, total_variation=0.0)
    t2d = vocabulary_of(D2T, 20).t2d
    loss = objective(frozen, draft_law(model, batch).detach(), batch, t2d, only)
    gradient = torch.autograd.grad(loss.total, model.lm_head.weight, allow_unused=True)[0]
    assert gradient is None or not gradient.any()


@torch.no_grad()
def test_the_losses_of_two_shares_add_up_to_the_loss_of_the_whole() -> None:
    model = _model("vanilla", 4)
    sequences = [sequence(10, 3, seed=1), sequence(14, 4, seed=2)]
    anchors = torch.tensor([[4, 7, 8], [5, 11, 12]])
    t2d = vocabulary_of(D2T, 20).t2d

    def loss(rows: slice, totals: torch.Tensor | None = None) -> Loss:
        batch = pack(sequences[rows], anchors[rows], GAMMA)
        law = draft_law(model, batch)
        return objective(block_output(model, batch), law, batch, t2d, WEIGHTS, totals)

    whole = pack(sequences, anchors, GAMMA)
    totals = sum(
        total_weights(pack(sequences[rows], anchors[rows], GAMMA), t2d, WEIGHTS)
        for rows in (slice(0, 1), slice(1, 2))
    )
    assert isinstance(totals, torch.Tensor)
    torch.testing.assert_close(totals, total_weights(whole, t2d, WEIGHTS))
    shares = [loss(slice(0, 1), totals), loss(slice(1, 2), totals)]
    expected = loss(slice(0, 2))
    for name in ("total", "cross_entropy", "distillation", "total_variation", "confidence"):
        found = sum(float(getattr(share, name)) for share in shares)
        assert found == pytest.approx(float(getattr(expected, name)), rel=1e-5)
    assert float(shares[0].total) != pytest.approx(float(expected.total) / 2, rel=1e-3)
