from __future__ import annotations

import pytest
import torch

from drafter_service.backbone import DSparkModel
from drafter_service.training.evaluation import Evaluation, evaluate, greedy_matches, walk
from tests.drafter_service.training import reference
from tests.drafter_service.training.test_loss import D2T
from tests.drafter_service.training.test_packing import sequence, spec


def _model() -> DSparkModel:
    model = reference.random_model(DSparkModel(spec()), seed=0)
    model.d2t = torch.tensor(D2T)
    return model


def test_a_walk_jumps_by_what_is_accepted_plus_the_bonus() -> None:
    # anchors 0..9; from 0: 2 accepted -> 3; from 3: 0 -> 4; from 4: 3 -> 8; 8 + 3 passes the end
    assert walk([2, 9, 9, 0, 3, 9, 9, 9, 1, 9], gamma=3) == (3, 8)
    assert walk([0, 0], gamma=3) == (0, 0)


def test_greedy_matches_are_what_decoding_by_hand_accepts() -> None:
    model = _model()
    one = sequence(30, 3, seed=4)
    ids = one.ids
    # Make the text agree with the drafter for a while after two anchors, then differ.
    for anchor, agreed in ((6, 2), (15, 3)):
        hidden = reference.block_hidden(model, one, anchor)
        for step in range(agreed):
            previous = ids[anchor : anchor + step + 1].tolist()
            ids[anchor + step + 1] = reference.block_law(model, hidden, previous)[step].argmax()
    expected = []
    for anchor in range(3, 29):
        hidden = reference.block_hidden(model, one, anchor)
        drafted = [int(ids[anchor])]
        for step in range(3):
            drafted.append(int(reference.block_law(model, hidden, drafted)[step].argmax()))
        matched = 0
        while (
            matched < 3
            and anchor + matched + 1 < len(ids)
            and drafted[matched + 1] == ids[anchor + matched + 1]
        ):
            matched += 1
        expected.append(matched)
    assert expected[3] >= 2
    assert expected[12] == 3
    assert greedy_matches(model, one) == expected


def test_expected_length_is_one_for_a_drafter_that_is_always_wrong() -> None:
    model = _model()
    one = sequence(12, 3, seed=1)
    one.log_normaliser.fill_(1e4)  # the target's mass lies outside the draft vocabulary
    figures = evaluate(model, [one], [False])
    assert figures.expected_length == pytest.approx(1)
    assert figures.acceptance == pytest.approx((0, 0, 0), abs=1e-6)
    assert figures.greedy_length is None
    assert figures.score == figures.expected_length


def test_expected_length_multiplies_the_acceptance_of_the_full_vocabulary() -> None:
    model = _model()
    one = sequence(9, 3, seed=1)
    laws = one.hidden.float() @ model.lm_head.weight.detach().T
    one.log_normaliser.copy_(laws.logsumexp(-1) + 0.3)
    anchors = [3, 4, 5, 6, 7]  # all there are: the draw is a permutation
    total = 0.0
    for anchor in anchors:
        hidden = reference.block_hidden(model, one, anchor)
        survival = 1.0
        steps = min(3, 8 - anchor)
        law = reference.block_law(model, hidden[:steps], one.ids[anchor : anchor + steps].tolist())
        for step in range(steps):
            truth = (laws[anchor + step] - one.log_normaliser[anchor + step]).exp()
            survival *= float(torch.minimum(law[step, D2T], truth).sum())
            total += survival
    figures = evaluate(model, [one], [False], anchors_per_sequence=5)
    assert figures.expected_length == pytest.approx(1 + total / 5, rel=1e-4)


def test_score_is_the_mean_of_both_lengths() -> None:
    figures = Evaluation(
        expected_length=1.5, acceptance=(0.5,), confidence_error=None, greedy_length=2.5
    )
    assert figures.score == 2.0
